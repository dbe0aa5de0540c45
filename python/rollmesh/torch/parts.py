"""Checks that a model consists of exactly the parts that transformers makes from its config.

A patched model computes what the config says and never calls its attention, MLPs and norms. So
each module is compared with the same module of a new model, which is made on the meta device and
needs no memory. Its class, attributes, parameters, buffers and children must be equal, and it may
have neither hooks nor methods set on the instance. The comparison looks through peft's LoRA layers
and modules_to_save.
`check` raises a ConfigError that names the first module that differs.

A full comparison takes milliseconds. `check` therefore remembers what it compared, and a later call
only looks for changes since then.
"""

from __future__ import annotations

import copy
import operator
import sys
import weakref
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rollmesh import ModelSpec
from rollmesh.errors import ConfigError
from rollmesh.model.families import FAMILIES
from rollmesh.model.reader import MAX_POSITION
from rollmesh.runtime.messages import shown
from rollmesh.torch.fused_head import unwrapped
from rollmesh.torch.lora import LORA, WHOLE, active_lora, base_of, in_use, unmerge_if_disabled

UNDO = "; undo the change, or train this model without rollmesh.torch.patch"
# Attributes without an effect on the forward pass. The lengths belong to rope, whose frequencies
# are compared by value.
FREE = frozenset(
    {
        *("training", "config", "gradient_checkpointing", "padding_idx", "sparse"),
        *("scale_grad_by_freq", "name_or_path", "loss_type", "kernel_config", "vocab_size"),
        *("_is_hf_initialized", "max_seq_len_cached", "original_max_seq_len"),
    }
)
FLOATS = "a tensor of float32, bfloat16, float16 or float64 numbers"
INTERNAL = frozenset(vars(nn.Module()))
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
PEFT_HOOKS = ("_adapter_names_pre_forward_hook", "_alora_offsets_pre_forward_hook")
ROPES = ("rope_settings", "local_rope_settings")  # of a spec
ROUNDINGS = (torch.float32, torch.bfloat16, torch.float16)  # that Module.to applies to frequencies


class _Module(NamedTuple):
    """A module as it was compared. It holds weak references only, so that models are freed."""

    ref: Any
    names: tuple[str, ...]
    attributes: list[Any]  # the values of `names`
    state: tuple[Any, ...]

    @staticmethod
    def of(module: Any, names: tuple[str, ...]) -> _Module:
        attributes = [vars(module)[name] for name in names]
        return _Module(weakref.ref(module), names, attributes, _state(module))

    def is_unchanged(self) -> bool:
        module = self.ref()
        if module is None or _state(module) != self.state:
            return False
        return all(map(operator.is_, map(vars(module).get, self.names), self.attributes))


def _state(module: Any) -> tuple[Any, ...]:
    """Returns what a comparison sees of a module, apart from attributes and nested modules."""
    own = vars(module)
    return (
        type(module),
        len(own),
        [len(own[kind]) for kind in HOOKS],
        [_form(x) for kind in ("_parameters", "_buffers") for x in own[kind].items()],
        [(name, child and weakref.ref(child)) for name, child in own["_modules"].items()],
    )


class _Seen(NamedTuple):
    template: Any
    spec: ModelSpec
    configs: list[tuple[Any, dict[str, Any]]]  # the model's and other ones, each with a copy
    code: list[tuple[Any, str, Any]]  # a class or the globals of a function, a name and its value
    modules: list[_Module]
    lora: list[Any]
    rope: list[Tensor]


_seen: weakref.WeakKeyDictionary[Any, _Seen] = weakref.WeakKeyDictionary()


def check(model: Any, spec: ModelSpec) -> None:
    """Raises a ConfigError unless the …ForCausalLM `model` computes what spec says.

    Unmerges adapters that are merged and disabled, as peft does when it calls such a layer."""
    seen = _seen.get(model)
    if seen is None or seen.spec != spec or not _is_unchanged(model, seen):
        seen = _seen[model] = _compared(model, spec, seen)
    for ref in seen.lora:
        unmerge_if_disabled(ref())
    head, embedding = in_use(model.lm_head), in_use(model.model.embed_tokens)
    is_tied = base_of(head).weight is embedding.weight and not active_lora("lm_head", head)
    if spec.tie_word_embeddings and not is_tied:
        raise ConfigError(
            "lm_head: expected the weight of embed_tokens, since tie_word_embeddings=True, got "
            "another one; train both as one, or set tie_word_embeddings=False for model and "
            "generator"
        )


def plain_class(module: Any) -> type:
    """The module's class without what patch and fully_shard put around it."""
    cls = type(module)
    while True:
        if "_rollmesh_base" in vars(cls):
            cls = vars(cls)["_rollmesh_base"]
        elif FSDPModule in cls.__bases__:
            cls = cls.__bases__[1]
        else:
            return cls


def _is_unchanged(model: Any, seen: _Seen) -> bool:
    if not all(module.is_unchanged() for module in seen.modules):
        return False
    rope = [x for _, x in _frequencies(model)]
    same = all(
        a.device == b.device and torch.equal(a, b) for a, b in zip(rope, seen.rope, strict=True)
    )
    return (
        same
        and model.config is seen.configs[0][0]
        and all(vars(config) == before for config, before in seen.configs)
        and all(getattr(place, name, None) is value for place, name, value in seen.code)
    )


# -------------------------------------------------------------------------------- a comparison
def _compared(model: Any, spec: ModelSpec, seen: _Seen | None) -> _Seen:
    _check_config(model.config, spec)
    template = seen.template if seen is not None and seen.spec == spec else _template(model, spec)
    compare = _Comparison(model)
    for name in ("model", "lm_head"):  # other children of the outermost module have no part in it
        compare.part(name, getattr(model, name, None), getattr(template, name))
    _check_rope(model, spec)
    _check_functions(model.config)
    rope = [x.clone() for _, x in _frequencies(model)]
    configs = [(config, copy.deepcopy(vars(config))) for config in compare.configs]
    return _Seen(template, spec, configs, compare.code, compare.seen, compare.lora, rope)


def _check_rope(model: Any, spec: ModelSpec) -> None:
    """transformers' frequencies may be rounded, as Module.to does, and of rope types that depend on
    a length they may be those of an earlier batch."""
    rope, settings = model.model.rotary_emb, spec.rope_settings
    lengths = [1, MAX_POSITION, int(rope.max_seq_len_cached)] if settings.depends_on_length else [1]
    for name, buffer in _frequencies(model):
        found, local = buffer.detach().float().cpu(), name.startswith("sliding_attention")
        wanted = [
            torch.from_numpy(spec.rope(length, local=local)[0]).to(d).float()
            for length in (lengths[:1] if name.endswith("original_inv_freq") else lengths)
            for d in ROUNDINGS
        ]
        if not any(torch.allclose(found, w, rtol=1e-5, atol=0) for w in wanted):
            raise ConfigError(
                f"model.rotary_emb.{name}: expected the frequencies of the config, "
                f"{shown(wanted[0].tolist())}, got {shown(found.tolist())}{UNDO}"
            )


def _frequencies(model: Any) -> list[tuple[str, Tensor]]:
    """Returns the buffers of the rope module; in some families each kind of layer has its own."""
    return [(name, x) for name, x in model.model.rotary_emb.named_buffers() if "inv_freq" in name]


def _check_functions(config: Any) -> None:
    """Attention and experts may be computed by functions that the config names."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name, known in (
        ("_attn_implementation", ALL_ATTENTION_FUNCTIONS),
        ("_experts_implementation", ALL_EXPERTS_FUNCTIONS),
    ):
        function = known.get(getattr(config, name, None))
        if function is not None and not _function(function).__module__.startswith("transformers."):
            raise ConfigError(
                f"config.{name}: expected one of transformers' own functions, got "
                f"{getattr(config, name)!r} of {_function(function).__module__}{UNDO}"
            )


def _template(model: Any, spec: ModelSpec) -> Any:
    """Makes a model of the same config that needs no memory."""
    import transformers

    family: Any = getattr(transformers, FAMILIES[spec.model_type].architecture)
    cls = plain_class(model)
    if cls is not family and getattr(cls, "forward", None) is not family.forward:
        raise ConfigError(
            f"model: expected a {family.__name__}, got a {cls.__module__}.{cls.__qualname__} "
            "with another forward method"
        )
    with torch.device("meta"):
        return family(copy.deepcopy(model.config))


def _check_config(config: Any, spec: ModelSpec) -> None:
    """A config may be edited after patch where that changes nothing. `patch` refused unknown keys,
    so those that are there now are added ones."""
    try:
        now = ModelSpec.from_hf(config)
    except ConfigError as error:
        if not hasattr(error, "names"):
            raise
        now = ModelSpec.from_hf(config, ignore=error.names)
    for name, old, new in [
        *differences(spec, now),
        *(("rope_parameters", getattr(spec, name), getattr(now, name)) for name in ROPES),
    ]:
        if old != new:
            raise ConfigError(
                f"config: expected {name}={shown(old)}, as at patch, got {shown(new)}{UNDO}"
            )


def differences(one: ModelSpec, other: ModelSpec) -> list[tuple[str, Any, Any]]:
    """Lists (field, its two values) of fields that change numbers and differ. Rope is left out."""
    names = ModelSpec.__dataclass_fields__.keys() - {
        "eos_token_ids",
        "max_position_embeddings",
        *ROPES,
    }
    both = [(name, getattr(one, name), getattr(other, name)) for name in sorted(names)]
    return [(name, a, b) for name, a, b in both if a != b]


class _Comparison:
    def __init__(self, model: Any):
        self.model, self.config = model, model.config
        self.configs = [model.config]
        self.code: list[tuple[Any, str, Any]] = []
        self.classes: set[type] = set()  # whose code was compared
        self.seen: list[_Module] = []
        self.lora: list[Any] = []  # weak references to LoRA layers

    def part(self, path: str, module: Any, template: Any) -> None:
        """One module and all below it."""
        cls = plain_class(module)
        wrapper = f"{cls.__module__}.{cls.__qualname__}"
        if wrapper == WHOLE or (wrapper == LORA and type(template) is nn.Linear):
            self.plain(path, module, ("_disable_adapters", "_active_adapter"))
            inner = in_use(module) if wrapper == WHOLE else module.base_layer
            self.part(path, inner, template)
            if wrapper == LORA:
                self.adapters(path, module)
            return
        if cls is not type(template) or not cls.__module__.startswith(("transformers.", "torch.")):
            raise ConfigError(self.class_message(path, cls, type(template)))
        self.method(path, cls)
        names = self.attributes(path, module, template)
        self.plain(path, module, names)
        own = vars(module)
        for kind in ("_parameters", "_buffers"):
            self.tensors(path, own[kind], vars(template)[kind])
        children, wanted = own["_modules"], vars(template)["_modules"]
        if children.keys() != wanted.keys():
            raise ConfigError(
                f"{path}: expected the modules {list(wanted)}, got {list(children)}{UNDO}"
            )
        for name, child in children.items():
            self.part(f"{path}.{name}", child, wanted[name])

    def attributes(self, path: str, module: Any, template: Any) -> tuple[str, ...]:
        """Compares the attributes of a module and returns their names."""
        own, wanted = vars(module), vars(template)
        is_model = hasattr(template, "post_init")  # transformers keeps notes in a whole model
        names = tuple(
            name
            for name in wanted.keys() - INTERNAL - FREE
            if not (is_model and name.startswith("_"))
        )
        for name in names:
            if name not in own or not _same(own[name], wanted[name]):
                raise ConfigError(
                    f"{path}.{name}: expected {shown(wanted[name])}, as the config says, "
                    f"got {shown(own.get(name))}{UNDO}"
                )
        config = own.get("config", self.config)
        if not any(config is each for each in self.configs):
            if config.to_dict() != self.config.to_dict():
                raise ConfigError(f"{path}.config: expected the model's, got another one{UNDO}")
            self.configs.append(config)
        return (*names, "config") if "config" in own else names

    def adapters(self, path: str, module: Any) -> None:
        """The adapters of a LoRA layer that take part."""
        self.lora.append(weakref.ref(module))
        for container in (module.lora_A, module.lora_B, module.lora_dropout):
            self.plain(path, container, ())
        out, width = base_of(module).weight.shape
        for adapter in active_lora(path, module):
            rank, dtypes = module.r[adapter], set()
            for name, shape in (("lora_A", (width, rank)), ("lora_B", (rank, out))):
                with torch.device("meta"):
                    template = nn.Linear(*shape, bias=False)
                part = getattr(module, name)[adapter]
                self.part(f"{path}.{name}.{adapter}", part, template)
                dtypes.add(str(part.weight.dtype))
            if len(dtypes) > 1:
                raise ConfigError(
                    f"{path}: expected lora_A and lora_B of one dtype, "
                    f"got {', '.join(sorted(dtypes))}"
                )
            dropout = module.lora_dropout[adapter]
            if type(dropout) not in (nn.Identity, nn.Dropout):
                raise ConfigError(
                    f"{path}.lora_dropout.{adapter}: expected a Dropout or Identity, "
                    f"got a {type(dropout).__name__}"
                )

    def tensors(self, path: str, found: dict[str, Any], wanted: dict[str, Any]) -> None:
        """Parameters or buffers: names, shapes, and that they are ordinary tensors with values."""
        extra = found.keys() - wanted.keys()
        for name in (*sorted(extra), *sorted(wanted)):
            x, template = found.get(name), wanted.get(name)
            expected = "none" if template is None else f"{FLOATS} of shape {tuple(template.shape)}"
            got = "none" if x is None else f"{_kind(x)} of shape {tuple(x.shape)}"
            if got != expected:
                raise ConfigError(
                    f"{path}.{name}: expected {expected}, as the config says, got {got}{UNDO}"
                )

    def plain(self, path: str, module: Any, names: tuple[str, ...]) -> None:
        """No method of the module's own and no hooks that would not fire. Remembers the module."""
        cls, own = type(module), vars(module)
        for name in own:
            if callable(getattr(cls, name, None)):
                raise ConfigError(
                    f"{path}.{name}: expected the method of {cls.__name__}, "
                    f"got one that is set on this module{UNDO}"
                )
        for hook in [hook for kind in HOOKS for hook in own[kind].values()]:
            name = _function(hook).__qualname__
            if name in PEFT_HOOKS:
                self.remove_peft_hooks()
                raise ConfigError(
                    f"{path}: expected the active adapters for all rows, "
                    "got adapter_names or alora_offsets; call set_adapter instead"
                )
            if not _is_fine(hook, path):
                raise ConfigError(
                    f"{path}: expected no hook of a module whose forward pass the kernels compute, "
                    f"got {name}; remove it"
                )
        self.seen.append(_Module.of(module, names))

    def remove_peft_hooks(self) -> None:
        """peft leaves them behind when a call of its model raises."""
        for module in self.model.modules():
            hooks = module._forward_pre_hooks
            for key in [
                key for key, hook in hooks.items() if _function(hook).__qualname__ in PEFT_HOOKS
            ]:
                del hooks[key]

    def method(self, path: str, cls: Any) -> None:
        """Checks that nobody replaced a class's forward method, what wraps it, or the functions
        that it calls."""
        if cls in self.classes:
            return
        self.classes.add(cls)
        home = next(each for each in cls.__mro__ if "forward" in vars(each))
        functions = unwrapped(cls.forward)
        forward = functions[-1]
        names = [(cls, "forward"), (cls, "__call__")]
        names += [(sys.modules.get(_home(forward)), name) for name in forward.__code__.co_names]
        code = [(place, name, getattr(place, name, None)) for place, name in names]
        self.code += code
        functions += [f for _, _, f in code if isinstance(f, FunctionType)]
        strange = [
            f
            for f in functions
            if f is not nn.Module.__call__ and not _home(f).startswith(("transformers.", "torch."))
        ]
        if _home(forward) != home.__module__ or strange:
            function = (strange or [forward])[0]
            raise ConfigError(
                f"{path}: expected {cls.__name__} as transformers has it, "
                f"got one with {_home(function)}.{function.__qualname__}{UNDO}"
            )

    def class_message(self, path: str, cls: type, wanted: type) -> str:
        if cls.__module__.startswith("peft."):
            return (
                f"{path}: expected LoRA adapters of linear layers, or modules_to_save, got a peft "
                f"{cls.__name__} of a {wanted.__name__}; merge it into the model, or train this "
                "model without rollmesh.torch.patch"
            )
        return (
            f"{path}: expected a {wanted.__module__}.{wanted.__name__}, as the config says, "
            f"got a {cls.__module__}.{cls.__name__}{UNDO}"
        )


def _is_fine(hook: Any, path: str) -> bool:
    """Whether a hook fires as it should, or has no effect.

    Hooks of the model, its layers and lm_head may only look at tensors, which is checked when those
    are called."""
    place, home = path.split("."), _function(hook).__module__
    if (
        len(place) == 1
        or (len(place) == 3 and place[1] == "layers")
        or home == "transformers.utils.output_capturing"
    ):
        return True
    is_known = home.startswith("torch.distributed.fsdp.") or _function(hook).__name__.startswith(
        "make_inputs_require_grad"
    )
    return is_known and path == "model.embed_tokens"


def _function(hook: Any) -> Any:
    """The function of a partial or of an object with __call__."""
    function = getattr(hook, "func", hook)
    return function if hasattr(function, "__qualname__") else type(function)


def _home(function: Any) -> str:
    """The module whose code a function is. functools.wraps copies __module__ from another one."""
    return str(getattr(function, "__globals__", {}).get("__name__", function.__module__))


def _form(item: tuple[str, Any]) -> tuple[Any, ...]:
    """Returns what `tensors` compares of a parameter or buffer."""
    name, x = item
    return (name,) if x is None else (name, type(x), x.shape, x.dtype, _without_values(x))


def _kind(x: Tensor) -> str:
    """Describes a tensor: as FLOATS if the kernels can convert and read it."""
    is_plain = type(x) in (Tensor, nn.Parameter) or isinstance(x, DTensor)
    place = _without_values(x)
    if is_plain and x.is_floating_point() and x.dtype.itemsize >= 2 and not place:
        return FLOATS
    return f"a {x.dtype} {type(x).__name__}{place}"


def _without_values(tensor: Tensor) -> str:
    """Says why the kernels cannot read a tensor's memory; "" if they can."""
    if isinstance(tensor, DTensor):  # a forward pass gathers it
        return ""
    if tensor.is_meta:
        return " on the meta device"
    if tensor.layout is not torch.strided:
        return f" of layout {tensor.layout}"
    if tensor.is_neg():
        return " that is lazily negated, which resolve_neg() computes"
    if not tensor.untyped_storage().nbytes():
        return " whose memory is freed"
    return ""


def _same(found: Any, wanted: Any) -> bool:
    """Whether two attributes are equal. Activations keep functions, partial ones and methods."""
    if type(found) is not type(wanted):
        return False
    if isinstance(wanted, partial):
        return bool(
            (found.func, found.args, found.keywords) == (wanted.func, wanted.args, wanted.keywords)
        )
    return bool(getattr(found, "__func__", found) == getattr(wanted, "__func__", wanted))


def mark(values: Any) -> list[Any]:
    """Identifies the tensors of a list, a model's output or a tensor: floating-point ones by
    address and by the number of writes to them, integers by their values."""
    each = (
        [values]
        if isinstance(values, Tensor)
        else values.values()
        if isinstance(values, dict)
        else values or ()
    )
    return [
        (t.data_ptr(), t.dtype, t.shape, float(t.sum()) if t.is_inference() else t._version)
        if t.is_floating_point()
        else (t.dtype, t.shape, t.detach().cpu().numpy().tobytes())
        for t in each
        if isinstance(t, Tensor)
    ]
