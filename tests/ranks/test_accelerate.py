"""Raw Accelerate loops: the numbers of DDP, whatever is prepared in whatever order, and what was saved resumes."""

import pytest
import torch
from torch.utils.data import DataLoader

from tests.accelerate_runs import accelerate, tiny_llama, token_rows
from tests.harness import ranks


def close(ours, theirs, digits=4):
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs):
        assert mine == pytest.approx(other, abs=0.5 * 10**-digits, rel=0.5 * 10**-digits), (ours, theirs)


def loop(order="model optimizer loader scheduler", accumulation=2, clip=1.0, precision=None, make=tiny_llama, **kwargs):
    """One epoch of a training loop: [(loss over all ranks, gradient norm)] by micro-batch, and what was prepared."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=accumulation, mixed_precision=precision, **kwargs)
    model = make()
    things = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}
    things["loader"] = DataLoader(token_rows(), batch_size=2)
    things["scheduler"] = torch.optim.lr_scheduler.LambdaLR(things["optimizer"], lambda step: 1 / (1 + step))
    for call in order.split(","):
        names = call.split()
        made = accelerator.prepare(*(things[name] for name in names))
        things.update(zip(names, made if len(names) > 1 else [made]))
    return accelerator, things, epoch(accelerator, things, clip)


def epoch(accelerator, things, clip=1.0, batches=None):
    model, optimizer = things["model"], things["optimizer"]
    out = []
    for number, batch in enumerate(things["loader"]):
        if batches is not None and number == batches:
            break
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            norm = 0.0
            if accelerator.sync_gradients:
                norm = float(accelerator.clip_grad_norm_(model.parameters(), clip))
            optimizer.step()
            things["scheduler"].step()
            optimizer.zero_grad()
        assert loss.dtype == torch.float32
        out += [float(accelerator.gather(loss.detach()[None]).mean()), norm]
    return out


ORDERS = [
    "model optimizer loader scheduler",
    "optimizer,loader,model,scheduler",
    "loader scheduler,optimizer,model",
    "model,optimizer scheduler,loader",
]


@ranks(2, timeout=120.0)
@pytest.mark.parametrize("order", ORDERS)
def test_a_loop_has_the_numbers_of_ddp_in_any_order_of_prepare(rank, world, order):
    with accelerate():
        theirs = loop()[2]
    with accelerate(shardkit=True):
        accelerator, things, ours = loop(order)
        assert type(things["model"]).__name__ == "LlamaForCausalLM"
        assert sum(p.numel() for p in things["model"].parameters()) < 0.6 * sum(p.numel() for p in tiny_llama().parameters())
    close(ours, theirs)
