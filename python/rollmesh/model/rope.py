"""Rotary frequencies, bit-identical to those of transformers' models on a CPU.

Each function follows the one of the same type in transformers' `modeling_rope_utils`, one float32
rounding where torch has one; the formulas' sources are named there. Two places need care:

* `scalar / tensor` in torch is `tensor.reciprocal() * scalar`: two roundings.
* torch's float32 `scalar ** tensor` is not the nearest float32. Its vector code (16 elements at a
  time, as with AVX2) evaluates exp(y · log x) in pairs of floats and is off by one bit for some
  percent of the arguments, one of Qwen3's own frequencies (θ = 10⁶, head_dim 128) among them; what
  does not fill 16 goes to the C library. `_power` computes both.

In transformers the frequencies of some types (dynamic, longrope) depend on the longest sequence of
a batch; here they depend on the generator's max_model_len.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.errors import ConfigError
from rollmesh.runtime.arguments import MAX_FLOAT32, boolean, choice
from rollmesh.runtime.messages import listed, plain, shown

Config = Mapping[str, Any]
F32 = NDArray[np.float32]
Frequencies = tuple[F32, float]  # of the elements of a head, and the factor on cos and sin
Pair = tuple[F32, F32]  # an unevaluated sum: a float and what rounding it lost

VECTOR = 16  # elements that torch's vector loop takes at a time
MAX_HEAD_DIM = 1024  # as in csrc/model/spec.c; checked before arrays of that size are made
ROPE_TABLES = (
    "rope_scaling",
    "rope_parameters",
)  # of configs of transformers 4 and 5; the first one that is not empty counts
KEYS = frozenset(
    {
        *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"),
        *("original_max_position_embeddings", "attention_factor"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),  # yarn
        *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor"),  # longrope, llama3
    }
)

# The C library's float32 power, which torch calls too. A power in double, rounded, differs once in
# a thousand; NumPy's may be another.
_powf = ctypes.CDLL(None).powf
_powf.argtypes, _powf.restype = (ctypes.c_float, ctypes.c_float), ctypes.c_float


@dataclass(frozen=True, slots=True)
class Rope:
    """Checked rope settings of a model."""

    type: str
    theta: float
    head_dim: int
    max_positions: int  # max_position_embeddings of the config
    parameters: tuple[tuple[str, Any], ...]  # what the type needs besides theta; lists as tuples

    @property
    def depends_on_length(self) -> bool:
        """Whether frequencies depend on max_model_len."""
        return self.type in ("dynamic", "longrope")

    @property
    def longest(self) -> int:
        """Number of positions that the settings are made for, as vLLM derives it: `factor` times
        max_positions for types that stretch."""
        p = dict(self.parameters)
        factor = p.get("factor") or 1
        if self.type == "yarn":
            return max(self.max_positions, int(p["original_max_position_embeddings"] * factor))
        return (
            int(self.max_positions * factor)
            if self.type in ("linear", "dynamic")
            else self.max_positions
        )

    def frequencies(self, max_model_len: int) -> Frequencies:
        """(inv_freq float32 [head_dim / 2], the factor on cos and sin) for contexts up to
        max_model_len."""
        settings = (
            f"rope_type={self.type!r} with {shown(dict(self.parameters))}, rope_theta={self.theta}"
        )
        try:
            with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                inv_freq, scale = TYPES[self.type][0](self, dict(self.parameters), max_model_len)
        except (
            ArithmeticError,
            ValueError,
            TypeError,
        ) as error:  # of math's functions: a double does not hold it
            raise ConfigError(f"{settings} gives no finite frequencies: {error}") from error
        if not (np.isfinite(inv_freq).all() and (inv_freq >= 0).all() and 0 < scale < math.inf):
            raise ConfigError(f"{settings} gives no finite frequencies")
        return inv_freq, scale


# ---------------------------------------------------------------------------------- float32 power
def _fma(a: F32, b: F32, c: F32 | np.float32) -> F32:
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _two_sum(a: F32, b: F32) -> Pair:
    total = a + b
    moved = total - a
    return total, (a - (total - moved)) + (b - moved)


def _add(x: Pair, y: Pair) -> Pair:
    """x + y where |x| ≥ |y|."""
    total = x[0] + y[0]
    return total, (((x[0] - total) + y[0]) + x[1]) + y[1]


def _add_any(x: Pair, y: Pair) -> Pair:
    total, lost = _two_sum(x[0], y[0])
    return total, lost + (x[1] + y[1])


def _times(x: Pair, y: F32) -> Pair:
    product = x[0] * y
    return product, _fma(x[1], y, _fma(x[0], y, -product))


def _multiply(x: Pair, y: Pair) -> Pair:
    product = x[0] * y[0]
    return product, _fma(x[0], y[1], _fma(x[1], y[0], _fma(x[0], y[0], -product)))


def _square(x: Pair) -> Pair:
    product = x[0] * x[0]
    return product, _fma(x[0] + x[0], x[1], _fma(x[0], x[0], -product))


def _divide(n: Pair, d: Pair) -> Pair:
    inverse = np.float32(1) / d[0]
    quotient = n[0] * inverse
    rest = _fma(-d[1], inverse, _fma(-d[0], inverse, np.ones_like(inverse)))
    return quotient, _fma(quotient, rest, _fma(n[1], inverse, _fma(inverse, n[0], -quotient)))


def _polynomial(x: F32, *coefficients: float) -> F32:
    value = np.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        value = _fma(value, x, np.float32(c))
    return value


def _log_pair(x: F32) -> Pair:
    """log x = exponent · log 2 + 2 · atanh((m − 1) / (m + 1)), m in [0.75, 1.5)."""
    exponent = np.frexp(x * np.float32(1 / 0.75))[1] - 1
    m, one = np.ldexp(x, -exponent), np.ones_like(x)
    r = _divide(_two_sum(-one, m), _two_sum(one, m))
    r2 = _square(r)
    tail = _polynomial(
        r2[0], 0.240320354700088500976562, 0.285112679004669189453125, 0.400007992982864379882812
    )
    two_thirds = (
        np.full_like(x, 0.66666662693023681640625),
        np.full_like(x, 3.69183861259614332084311e-09),
    )
    log_2 = (np.full_like(x, 0.69314718246459960938), np.full_like(x, -1.904654323148236017e-09))
    total = _add(
        _times(log_2, exponent.astype(np.float32)), (r[0] * np.float32(2), r[1] * np.float32(2))
    )
    return _add(total, _multiply(_multiply(r2, r), _add_any(_times(r2, tail), two_thirds)))


def _exp_pair(x: Pair) -> F32:
    n = np.rint((x[0] + x[1]) * np.float32(1 / math.log(2)))
    high, lost = _two_sum(x[0], n * np.float32(-0.693145751953125))
    high, more = _two_sum(high, n * np.float32(-1.428606765330187045e-06))
    low = (lost + x[1]) + more
    s: Pair = (high + low, (high - (high + low)) + low)
    u = _polynomial(
        s[0],
        0.00136324646882712841033936,
        0.00836596917361021041870117,
        0.0416710823774337768554688,
        0.166665524244308471679688,
        0.499999850988388061523438,
    )
    t = _add(s, _times(_square(s), u))
    total = np.float32(1) + t[0]
    value: F32 = np.ldexp(total + (((np.float32(1) - total) + t[0]) + t[1]), n.astype(np.int32))
    return value


def _power(base: float, exponents: F32) -> F32:
    """torch's `base ** exponents` for float32 exponents on a CPU with AVX2."""
    whole = len(exponents) // VECTOR * VECTOR
    out = np.array([_powf(base, y) for y in exponents], np.float32)
    y = exponents[:whole]
    out[:whole] = _exp_pair(_times(_log_pair(np.full_like(y, base)), y))
    return out


# -------------------------------------------------------------------------------------- the types
def _positions_powers(theta: float, dim: int, over: int) -> F32:
    """theta ** ((0, 2, 4, … below dim) / over)"""
    return _power(theta, np.arange(0, dim, 2, dtype=np.float32) / np.float32(over))


def _inverse(x: F32) -> F32:
    return np.float32(1) / x


def _default(rope: Rope, p: Config, length: int) -> Frequencies:
    return _inverse(_positions_powers(rope.theta, rope.head_dim, rope.head_dim)), 1.0


def _linear(rope: Rope, p: Config, length: int) -> Frequencies:
    return _default(rope, p, length)[0] / np.float32(p["factor"]), 1.0


def _proportional(rope: Rope, p: Config, length: int) -> Frequencies:
    """The first part of the head is rotated; the rest stands still (frequency 0)."""
    angles = int(p["partial_rotary_factor"] * rope.head_dim // 2)
    inv_freq = np.zeros(rope.head_dim // 2, np.float32)
    inv_freq[:angles] = _inverse(_positions_powers(rope.theta, 2 * angles, rope.head_dim))
    return inv_freq / np.float32(p["factor"]), 1.0


def _dynamic(rope: Rope, p: Config, length: int) -> Frequencies:
    """NTK scaling. Beyond max_position_embeddings transformers' length is a tensor, and its
    arithmetic float32."""
    factor, exponent = p["factor"], rope.head_dim / (rope.head_dim - 2)
    if length > rope.max_positions:
        f32 = np.float32
        stretch = f32(length) * f32(factor) / f32(rope.max_positions) - f32(factor - 1)
        theta = float(f32(math.pow(float(stretch), exponent)) * f32(rope.theta))
    else:
        theta = (
            rope.theta
            * (factor * rope.max_positions / rope.max_positions - (factor - 1)) ** exponent
        )
    return _inverse(_positions_powers(theta, rope.head_dim, rope.head_dim)), 1.0


def mscale(scale: float, weight: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0


def _yarn(rope: Rope, p: Config, length: int) -> Frequencies:
    dim, original = rope.head_dim, p["original_max_position_embeddings"]
    factor = rope.max_positions / original if p["factor"] is None else p["factor"]

    scale = p.get("attention_factor")
    if scale is None:
        m, m_all = p.get("mscale"), p.get("mscale_all_dim")
        scale = mscale(factor, m) / mscale(factor, m_all) if m and m_all else mscale(factor)

    def correction(rotations: float) -> float:
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = correction(p.get("beta_fast") or 32), correction(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    f32 = np.float32
    ramp = np.clip((np.arange(dim // 2, dtype=f32) - f32(low)) / f32(high - low), f32(0), f32(1))
    keep = f32(1) - ramp
    powers = _positions_powers(rope.theta, dim, dim)
    return _inverse(f32(factor) * powers) * (f32(1) - keep) + _inverse(powers) * keep, float(scale)


def _longrope(rope: Rope, p: Config, length: int) -> Frequencies:
    original = p["original_max_position_embeddings"]
    factor = rope.max_positions / original if p.get("factor") is None else p["factor"]
    scale = p.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = np.array(p["long_factor"] if length > original else p["short_factor"], np.float32)
    return _inverse(factors * _positions_powers(rope.theta, rope.head_dim, rope.head_dim)), float(
        scale
    )


def _llama3(rope: Rope, p: Config, length: int) -> Frequencies:
    f32, low, high, original = (
        np.float32,
        p["low_freq_factor"],
        p["high_freq_factor"],
        p["original_max_position_embeddings"],
    )
    factor, inv_freq = f32(p["factor"]), _default(rope, p, length)[0]
    wavelength = _inverse(inv_freq) * f32(2 * math.pi)
    shortest, longest = f32(original / high), f32(original / low)
    scaled = np.where(wavelength > longest, inv_freq / factor, inv_freq)
    smooth = (_inverse(wavelength) * f32(original) - f32(low)) / f32(high - low)
    between = (f32(1) - smooth) * scaled / factor + smooth * scaled
    return np.where((wavelength >= shortest) & (wavelength <= longest), between, scaled), 1.0


# type → (function, the parameters it must have)
TYPES: dict[str, tuple[Callable[[Rope, Config, int], Frequencies], tuple[str, ...]]] = {
    "default": (_default, ()),
    "linear": (_linear, ("factor",)),
    "dynamic": (_dynamic, ("factor",)),
    "yarn": (_yarn, ("factor",)),
    "longrope": (_longrope, ("short_factor", "long_factor")),
    "llama3": (_llama3, ("factor", "low_freq_factor", "high_freq_factor")),
    "proportional": (_proportional, ()),
}


# ---------------------------------------------------------------------------------- from a config
def number(name: str, value: Any, low: float, *, strict: bool = False) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not low <= value <= MAX_FLOAT32
        or (strict and value == low)
    ):
        raise ConfigError(
            f"{name}: expected a finite float32 {'>' if strict else '>='} {low:g}, got "
            f"{shown(value)}"
        )
    return float(value) if isinstance(value, float) else value


def _factors(name: str, value: Any, count: int) -> tuple[float, ...]:
    seen = len(value) if isinstance(value, (list, tuple)) else shown(value)
    if seen != count:
        raise ConfigError(
            f"{name}: expected {count} entries, half of the elements of a head that rope turns, "
            f"got {seen}"
        )
    return tuple(number(f"{name}[{i}]", v, 0, strict=True) for i, v in enumerate(value))


def _checked(name: str, key: str, value: Any, head_dim: int) -> Any:
    """One parameter of a rope type. None stays None where transformers reads it as "not given"."""
    if key in ("short_factor", "long_factor"):
        return _factors(f"{name}.{key}", value, head_dim // 2)
    if key == "truncate":
        return boolean(f"{name}.truncate", value)
    if value is None and key in (
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "factor",
    ):
        return None
    if key in ("factor", "original_max_position_embeddings"):
        return number(f"{name}.{key}", value, 1)
    return number(f"{name}.{key}", value, 0, strict=not key.startswith(("mscale", "partial")))


def table_of(config: Config) -> tuple[str, Config]:
    name = next((name for name in ROPE_TABLES if config.get(name)), ROPE_TABLES[-1])
    table = config.get(name) or {}
    if not isinstance(table, Mapping):
        raise ConfigError(f"{name}: expected a mapping, got {shown(table)}")
    return name, table


def unknown_keys(config: Config, path: str = "") -> list[tuple[str, Any]]:
    """Keys of the rope table that no rope type reads, as (table.key, value). None and False switch
    a key off. path: of the table inside the config's table, for example ".full_attention"."""
    name, table = table_of(config)
    name += path
    odd = [
        (key, value)
        for key, value in table.items()
        if key not in KEYS and value is not None and value is not False
    ]
    return [(f"{name}.{key if isinstance(key, str) else plain(key)}", value) for key, value in odd]


def from_config(
    config: Config,
    head_dim: int,
    max_positions: int,
    default_theta: float,
    default_partial: float | None,
) -> Rope:
    """The settings as transformers standardizes them: `rope_scaling` (4.x) before `rope_parameters`
    (5.x), values inside before values beside, default_theta when there is none. default_partial:
    the partial_rotary_factor, where the key is missing, of a family that rotates the first elements
    of a head; None: the family rotates whole heads. Raises ConfigError for every setting that rope
    does not compute."""
    name, given = table_of(config)
    if unknown := unknown_keys(config):
        raise ConfigError(f"{name}: expected keys of the rope types, got {listed(unknown)}")
    if head_dim > MAX_HEAD_DIM:
        raise ConfigError(f"head_dim: expected at most {MAX_HEAD_DIM}, got {head_dim}")
    p = {
        key: value
        for key, value in given.items()
        if key in KEYS and key not in ("type", "rope_type", "rope_theta")
    }
    rope_type = choice("rope_type", given.get("rope_type", given.get("type", "default")), [*TYPES])
    theta = number(
        "rope_theta",
        given.get("rope_theta", config.get("rope_theta", default_theta)),
        0,
        strict=True,
    )

    partial = p.setdefault(
        "partial_rotary_factor", config.get("partial_rotary_factor", default_partial)
    )
    if partial is None:
        p["partial_rotary_factor"] = partial = 1.0
    number("partial_rotary_factor", partial, 0)
    if default_partial is not None:
        turned = int(head_dim * partial)
        if rope_type == "proportional" or not 2 <= turned <= head_dim or turned % 2:
            raise ConfigError(
                f"partial_rotary_factor={shown(partial)} with rope_type={rope_type!r}: expected "
                "an even number of at least 2 of the "
                f"head_dim={head_dim} elements, got {turned}"
            )
        head_dim, p["partial_rotary_factor"], partial = turned, 1.0, 1.0
    if partial != 1.0 and (rope_type != "proportional" or partial > 1.0):
        raise ConfigError(
            f"partial_rotary_factor={partial} with rope_type={rope_type!r}: this family rotates "
            "whole heads"
        )
    if rope_type in ("llama3", "yarn", "longrope"):
        key = "original_max_position_embeddings"
        beside = config.get(key)
        p[key] = p.get(key, max_positions) if beside is None else beside
    if rope_type == "proportional":
        p.setdefault("factor", 1.0)
    if missing := [key for key in TYPES[rope_type][1] if key not in p]:
        raise ConfigError(f"rope_type={rope_type!r} needs {', '.join(missing)}")
    p = {key: _checked(name, key, value, head_dim) for key, value in p.items()}
    _check_rules(rope_type, theta, head_dim, p)
    rope = Rope(rope_type, theta, head_dim, max_positions, tuple(sorted(p.items())))
    rope.frequencies(max_positions)
    return rope


def _check_rules(rope_type: str, theta: float, head_dim: int, p: Config) -> None:
    if rope_type not in ("yarn", "longrope") and p.get("factor", 1.0) is None:
        raise ConfigError(f"rope_type={rope_type!r} needs a factor, not None")
    if rope_type == "dynamic" and head_dim <= 2:
        raise ConfigError(
            f"head_dim={head_dim} with rope_type='dynamic': the exponent head_dim/(head_dim - 2) "
            "has no value"
        )
    if rope_type == "yarn" and theta == 1:
        raise ConfigError("rope_theta=1 with rope_type='yarn': its logarithm is divided by")
    if rope_type == "llama3" and p["high_freq_factor"] <= p["low_freq_factor"]:
        raise ConfigError(
            f"high_freq_factor={p['high_freq_factor']} does not exceed "
            f"low_freq_factor={p['low_freq_factor']}"
        )
    if rope_type == "longrope" and p["original_max_position_embeddings"] <= 1:
        raise ConfigError(
            "original_max_position_embeddings=1 with rope_type='longrope': its logarithm is "
            "divided by"
        )
