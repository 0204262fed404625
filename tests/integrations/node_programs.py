"""Programs of Trainer, Accelerate and Lightning that train alike on one node and on several, and say what they have found.

Each worker writes `result-RANK.json`: the losses of all steps, what an evaluation gathered over all workers, its place, and how
often it saved. With a first argument a program goes on from the checkpoint of that name.
"""

_HEAD = """
import json, os, sys, torch

torch.set_num_threads(1)
resumed = sys.argv[1] if len(sys.argv) > 1 else None
drawn = torch.Generator().manual_seed(1)
inputs = torch.randn(96, 8, generator=drawn)
targets = inputs.sum(1, keepdim=True) + torch.randn(96, 1, generator=drawn) / 4
def layers(norm=torch.nn.BatchNorm1d):
    torch.manual_seed(2)
    # A bias before a norm has a gradient of rounding errors alone, which Adam makes as long as any other.
    return torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), norm(16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
def note(rank, **found):
    open(f"result-{rank}.json", "w").write(json.dumps(found))
def total(model):
    return sum(each.detach().double().abs().sum().item() for each in model.parameters())
"""
TRAINER = (
    _HEAD
    + """
from fastps.integrations.transformers import Trainer, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers(torch.nn.LayerNorm)  # a Trainer averages no buffers
    def forward(self, x, labels):
        found = self.layers(x)
        return {"loss": torch.nn.functional.mse_loss(found, labels), "logits": found}

saves = []
class Mine(Trainer):
    def _save(self, *arguments, **options):
        saves.extend([1] * self.args.should_save)  # which a Trainer asks inside
        super()._save(*arguments, **options)

given = TrainingArguments(
    "out", max_steps=12, per_device_train_batch_size=4, learning_rate=1e-2, use_cpu=True, report_to=[], disable_tqdm=True,
    logging_steps=1, save_steps=6, eval_strategy="steps", eval_steps=6,
)
rows = [{"x": x, "labels": y} for x, y in zip(inputs, targets)]
metrics = lambda found: {"error": float(abs(found.predictions - found.label_ids).mean()), "rows": len(found.predictions)}
trainer = Mine(Model(), given, train_dataset=rows, eval_dataset=rows[:37], compute_metrics=metrics)
trainer.train(resume_from_checkpoint=resumed)
log = trainer.state.log_history
note(
    given.process_index, losses={entry["step"]: entry["loss"] for entry in log if "loss" in entry},
    metrics=[[entry[name] for name in ("eval_loss", "eval_error", "eval_rows")] for entry in log if "eval_loss" in entry],
    weights=total(trainer.model), saves=len(saves), place=[given.local_process_index, given.world_size],
    steps=max(float(each["step"]) for each in trainer.optimizer.state.values()),
)
"""
)
ACCELERATE = (
    _HEAD
    + """
from accelerate.utils import DataLoaderConfiguration, broadcast_object_list, set_seed
from fastps.integrations.accelerate import Accelerator

accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
set_seed(3)
model = layers()
data = torch.utils.data.TensorDataset(inputs, targets)
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
tests = torch.utils.data.DataLoader(torch.utils.data.Subset(data, range(37)), batch_size=4)
adam = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(adam, 4, 0.9)
model, optimizer, loader, tests, schedule = accelerator.prepare(model, adam, loader, tests, schedule)
losses, metrics, saves, first = {}, [], 0, 0
if resumed:
    accelerator.load_state(resumed)
    first = 1
for epoch in range(first, 2):
    loader.set_epoch(epoch)
    for step, (x, y) in enumerate(loader, len(loader) * epoch):
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(); schedule.step(); optimizer.zero_grad()
        losses[step] = accelerator.reduce(loss.detach(), "mean").item()
    optimizer.optimizer.average_buffers()
    model.eval()
    with torch.no_grad():
        errors = torch.cat([accelerator.gather_for_metrics((model(x) - y).abs()) for x, y in tests])
    metrics.append([errors.mean().item(), len(errors)])
    model.train()
    if not epoch:
        accelerator.save_state("saved")
        saves += accelerator.is_main_process
word = [f"of worker {accelerator.process_index}"]
assert broadcast_object_list(word)[0] == "of worker 0"
with accelerator.main_process_first(), accelerator.local_main_process_first():
    pass
place = [accelerator.local_process_index, accelerator.num_processes]
assert accelerator.is_local_main_process == (place[0] == 0)
job = optimizer.optimizer
accelerator.end_training()
steps = max(float(each["step"]) for each in job.state.values())
note(accelerator.process_index, losses=losses, metrics=metrics, weights=total(model), saves=saves, place=place, steps=steps)
"""
)
LIGHTNING = (
    _HEAD
    + """
import warnings
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from fastps.integrations.lightning import FastpsStrategy
from torchmetrics import MeanMetric

warnings.filterwarnings("ignore")
saves, losses, metrics = [], {}, []
class Saving(TorchCheckpointIO):
    def save_checkpoint(self, *arguments, **options):
        saves.append(1)
        super().save_checkpoint(*arguments, **options)

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers, self.error = layers(), MeanMetric()
    def prepare_data(self):
        assert self.trainer.local_rank == 0
    def training_step(self, batch, index):
        loss = torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        losses[self.trainer.global_step] = self.all_gather(loss.detach()).mean().item()
        return loss
    def validation_step(self, batch, index):
        found = self.layers(batch[0])
        self.error(found - batch[1])
        self.log("error", self.error)
        self.log("loss", torch.nn.functional.mse_loss(found, batch[1]), sync_dist=True)
    def on_train_epoch_end(self):
        metrics.append([float(self.trainer.callback_metrics[name]) for name in ("error", "loss")])
    def configure_optimizers(self):
        adam = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [adam], [torch.optim.lr_scheduler.StepLR(adam, 1, 0.9)]

seed_everything(3, verbose=False)
data = torch.utils.data.TensorDataset(inputs, targets)
kept = ModelCheckpoint("saved", filename="{epoch}", save_top_k=-1)
trainer = Trainer(
    accelerator="cpu", strategy=FastpsStrategy(), max_epochs=2, callbacks=[kept], plugins=[Saving()], logger=False,
    enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, gradient_clip_val=1.0,
)
module = Module()
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
tests = torch.utils.data.DataLoader(torch.utils.data.Subset(data, range(36)), batch_size=4)
trainer.fit(module, loader, tests, ckpt_path=resumed)
note(
    trainer.global_rank, losses=losses, metrics=metrics, weights=total(module), saves=len(saves),
    place=[trainer.local_rank, trainer.world_size], steps=float(trainer.optimizers[0].state_dict()["state"][0]["step"]),
)
"""
)
