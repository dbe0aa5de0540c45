"""A run's metrics in Weights & Biases too: `rollmesh grpo --wandb PROJECT`. Off by default; the
package `wandb` is imported here only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rollmesh.run.config import Config
from rollmesh.run.files import told_as
from rollmesh.run.metrics import Metrics


@contextmanager
def wandb_log(project: str, out: Path, config: Config) -> Iterator[Callable[[Metrics], None]]:
    """A function that logs a line of metrics in a run of `project`, named as the run folder. A
    resumed run is another run there, with the same name. With WANDB_MODE=offline nothing is sent:
    `wandb sync` sends what is in `out`/wandb. ConfigError: W&B refuses, as without a login."""
    import wandb

    settings = wandb.Settings(console="off", silent=True)  # the display is ours
    with told_as(f"--wandb {project}: expected a login of W&B, or WANDB_MODE=offline"):
        run = wandb.init(
            project=project, name=out.name, dir=out, config=config.as_dict(), settings=settings
        )
    with run:
        run.define_metric("*", step_metric="step")
        yield run.log
