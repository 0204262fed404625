"""fastps.integrations.lightning: one argument, `Trainer(strategy=FastpsStrategy(...))`, lets Lightning train with fastps.

`PublishCallback` publishes the weights of a training with any strategy.

Border: the strategy starts workers, wraps optimizers and moves metrics between workers; Lightning's own plugins do the rest.
No file outside of this folder imports lightning. Arrows: it imports fastps.evaluation and what is below it. Its import
registers the names "fastps", "fastps_spawn", "fastps_fork" and "fastps_notebook", so that `Trainer(strategy="fastps")` finds
them.
"""

from fastps.system.extras import how_to_install

try:
    import lightning.pytorch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"fastps.integrations.lightning needs the package lightning, which cannot be imported ({error}):"
        f" {how_to_install('lightning')}"
    ) from error

from fastps.integrations.lightning.publishing import PublishCallback
from fastps.integrations.lightning.strategy import FastpsStrategy

__all__ = ["FastpsStrategy", "PublishCallback"]
