"""Lightning's Trainer: the optimizer that configure_optimizers returns is wrapped."""

from pathlib import Path

from tests.clients import programs

programs.needs("lightning")


PROGRAM = """
import sys, warnings
import lightning, torch
import fastps
from tests.clients import digits

warnings.filterwarnings("ignore")


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = digits.make_model()

    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        self.wrapped = fastps.DistributedOptimizer(digits.make_sgd(self.net))
        return self.wrapped


lightning.seed_everything(fastps.rank(), verbose=False)
module = Digits()
trainer = lightning.Trainer(
    max_epochs=digits.EPOCHS, accelerator="cpu", devices=int(sys.argv[1]), logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(module, digits.loader())
digits.report(module.net, trainer.global_step, module.wrapped)
"""


def test_trainer_learns_what_the_plain_program_learns(tmp_path: Path) -> None:
    programs.check_two_workers(PROGRAM, tmp_path, "1")


def test_trainer_on_two_devices_is_refused_by_name(tmp_path: Path) -> None:
    ended = programs.run(PROGRAM, tmp_path, "2")
    assert ended.returncode != 0
    assert "inside DistributedDataParallel" in ended.stderr
    assert "pass the bare module" in ended.stderr
