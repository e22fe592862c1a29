"""peft's adapters in Accelerate's loops and in transformers' Trainer: the numbers of DDP, and what was saved loads."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.accelerate_runs import accelerate, older, tiny_llama, token_rows
from tests.harness import ranks

pytest.importorskip("peft")

TYPES = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
ATTENTION = ["q_proj", "v_proj"]
NOT_REENTRANT = {"use_reentrant": False}  # the default since transformers 5. With the other, DDP fails on adapters


def close(ours, theirs, digits=4):
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs):
        assert mine == pytest.approx(other, abs=0.5 * 10**-digits, rel=0.5 * 10**-digits), (ours, theirs)


def lora(dtype=torch.float32, base=None, **changes):
    """A tiny Llama with adapters that do something from the start."""
    from peft import LoraConfig, get_peft_model

    base = (base or tiny_llama()).to(dtype)
    given = {"r": 4, "target_modules": ATTENTION, "init_lora_weights": False, "task_type": "CAUSAL_LM", **changes}
    return get_peft_model(base, LoraConfig(**given))


def with_head():
    return lora(modules_to_save=["lm_head"])


def with_base():
    """The base model trained with the adapters, and its activations computed again in backward."""
    model = lora()
    model.requires_grad_(True)
    model.gradient_checkpointing_enable(NOT_REENTRANT)
    return model


def two_adapters():
    """The first one is frozen and active beside the second, which is trained."""
    from peft import LoraConfig

    model = lora()
    config = LoraConfig(r=2, target_modules=["o_proj", "q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model.add_adapter("second", config)
    model.set_adapter("second")
    return model


def both_adapters():
    """Two adapters in the same layers, active and trained together."""
    model = two_adapters()
    model.set_adapter("default")
    model.base_model.set_adapter(["default", "second"])
    return model


def in_bf16():
    return lora(torch.bfloat16)


SHARDED, FULL = TYPES
IN_A_LOOP = [
    (lora, FULL), (with_head, SHARDED), (with_base, FULL), (two_adapters, SHARDED), (both_adapters, FULL),
    (in_bf16, SHARDED),
]  # fmt: skip
IN_A_TRAINER = [
    (lora, SHARDED), (lora, FULL), (with_head, FULL), (with_base, SHARDED), (two_adapters, FULL),
    (both_adapters, SHARDED), (in_bf16, FULL),
]  # fmt: skip


def sharded(kind):
    return accelerate(shardkit=True, FSDP_STATE_DICT_TYPE=kind)


def prepared(make):
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = make()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return accelerator, *accelerator.prepare(model, optimizer, DataLoader(token_rows(), batch_size=4))


def steps(accelerator, model, optimizer, loader):
    out = []
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        out += [float(accelerator.clip_grad_norm_(model.parameters(), 1.0))]
        optimizer.step()
        optimizer.zero_grad()
        out += [float(accelerator.gather(loss.detach()[None]).mean())]
    return out


@ranks(2, timeout=120.0)
@pytest.mark.parametrize(("make", "kind"), IN_A_LOOP, ids=lambda value: getattr(value, "__name__", value))
def test_a_loop_has_the_numbers_of_ddp_and_goes_on_from_a_checkpoint(rank, world, make, kind, tmp_path):
    with accelerate():
        theirs = steps(*prepared(make))
    with sharded(kind):
        run = prepared(make)
        ours = steps(*run)
        close(ours, theirs)
        run[0].save_state(tmp_path)
        ahead = steps(*run)
        run[0].load_state(tmp_path)
        assert steps(*run) == ahead
        fresh = prepared(make)
        fresh[0].load_state(tmp_path)
        assert steps(*fresh) == ahead


# ------------------------------------------------------------------------------------------------------- Trainer


def trainer(folder, make, cls=None, **changes):
    """A Trainer that takes 4 steps and saves after 2. TrainingArguments read the environment: made inside the block."""
    from transformers import Trainer, TrainingArguments

    arguments = {
        "max_steps": 4, "save_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
        "max_grad_norm": 1.0, "report_to": "none", "disable_tqdm": True, "save_strategy": "steps",
    }  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in token_rows()]
    arguments = TrainingArguments(output_dir=str(folder), **arguments | changes)
    return Trainer(model=make(), args=arguments, train_dataset=rows, eval_dataset=rows[:8])


def logged(trainer, first=1):
    """[loss, gradient norm] by step, from step `first` on."""
    history = [entry for entry in trainer.state.log_history if "grad_norm" in entry and entry["step"] >= first]
    return [number for entry in history for number in (entry["loss"], float(entry["grad_norm"]))]


def adapters_in(folder):
    """{file/name: tensor} of all adapter files below `folder`."""
    from safetensors.torch import load_file

    files = sorted(folder.rglob("adapter_model.safetensors"))
    return {f"{file.relative_to(folder)}/{name}": t for file in files for name, t in load_file(file).items()}


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=token_rows()[:3]).logits.float()


@ranks(2, timeout=180.0)
@pytest.mark.parametrize(("make", "kind"), IN_A_TRAINER, ids=lambda value: getattr(value, "__name__", value))
def test_trainer_has_the_numbers_of_ddp_resumes_and_writes_adapters(rank, world, make, kind, tmp_path):
    from peft import PeftModel

    with accelerate():
        theirs = trainer(tmp_path / "ddp", make)
        theirs.train()
        want = theirs.evaluate()["eval_loss"]
        theirs.save_model(tmp_path / "theirs")
    with sharded(kind):
        ours = trainer(tmp_path / "ours", make)
        ours.train()
        close(logged(ours), logged(theirs))
        assert len(logged(ours)) == 8
        mine = ours.evaluate()["eval_loss"]
        assert mine == pytest.approx(want, abs=5e-5)

        ours.save_model(tmp_path / "final")
        got, expected = adapters_in(tmp_path / "final"), adapters_in(tmp_path / "theirs")
        assert got.keys() == expected.keys() and got
        for name, tensor in expected.items():
            assert got[name].dtype == tensor.dtype
            torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-4, msg=name)
        if make not in (with_base, both_adapters):  # what one adapter's files do not hold
            base = tiny_llama().to(ours.model.dtype)
            loaded = PeftModel.from_pretrained(base, tmp_path / "final" / ("second" if make is two_adapters else ""))
            torch.testing.assert_close(logits(loaded), logits(ours.model), rtol=1e-5, atol=1e-5)

        resumed = trainer(tmp_path / "ours", make)
        resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
        assert logged(resumed, 3) == logged(ours, 3)
        assert resumed.evaluate()["eval_loss"] == mine
        if kind == "FULL_STATE_DICT" and make not in (with_base, both_adapters):  # which DDP does not resume either
            resumed = trainer(tmp_path / "ours", make)
            resumed.train(resume_from_checkpoint=str(tmp_path / "ddp" / "checkpoint-2"))
            close(logged(resumed, 3), logged(theirs, 3))


# ------------------------------------------------------------------------------------------------- what is gathered


def gathered(monkeypatch):
    """A list that fills with the names of parameters that are gathered for a file."""
    from shardkit.runtime.flat_param import FlatParam

    stock, names = FlatParam.gather_like_shard, []

    def gather(self, *args, **kwargs):
        names.extend(info.name for info in self.infos)
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(FlatParam, "gather_like_shard", gather)
    return names


@ranks(2)
@pytest.mark.parametrize("save", ["trainer", "model", "checkpoint"])
def test_saving_adapters_gathers_nothing_of_a_frozen_base_model(rank, world, save, tmp_path):
    import accelerate.utils as accelerate_utils

    with sharded("FULL_STATE_DICT"), pytest.MonkeyPatch.context() as patch:
        run = trainer(tmp_path / "run", with_head, max_steps=1, save_strategy="no")
        run.train()
        names = gathered(patch)
        if save == "trainer":
            run.save_model(tmp_path / "final")
        elif save == "model":
            run.model.save_pretrained(tmp_path / "final")
        else:
            plugin = run.accelerator.state.fsdp_plugin
            accelerate_utils.save_fsdp_model(plugin, run.accelerator, run.model, tmp_path, adapter_only=True)
        assert names and all("lora" in name or "modules_to_save" in name for name in names), names
        if save != "checkpoint":
            whole = run.accelerator.get_state_dict(run.model)  # the idiom of other scripts: everything
            assert (len(whole) == len(with_head().state_dict())) == (rank == 0)
            run.model.save_pretrained(tmp_path / "idiom", state_dict=whole, is_main_process=rank == 0)
            dist.barrier()
            found, same = adapters_in(tmp_path / "final"), adapters_in(tmp_path / "idiom")
            assert found.keys() == same.keys() and all(torch.equal(found[name], same[name]) for name in found)
            assert len(found) == 2 * 2 * 2 + 1
            want = [k for k in whole if "lora" in k or "modules_to_save" in k]
            if rank == 0:
                assert len(want) == len(found)
                by_name = {name.rpartition("/")[2]: tensor for name, tensor in found.items()}
                for key in want:
                    assert torch.equal(by_name[key.replace(".default", "").replace(".modules_to_save", "")], whole[key])


# --------------------------------------------------------------------------------------------------- further ways


def adapter_file(run, folder, save=True):
    """Through Accelerate's functions, imported here: names that were imported before stay the stock functions."""
    from accelerate.utils import load_fsdp_model, save_fsdp_model

    accelerator, model = run[:2]
    function = save_fsdp_model if save else load_fsdp_model
    return function(accelerator.state.fsdp_plugin, accelerator, model, str(folder), adapter_only=True)


@ranks(2)
@pytest.mark.parametrize("make", [lora, with_head, two_adapters], ids=lambda make: make.__name__)
def test_adapters_alone_load_from_either_type_and_the_base_stays(rank, world, make, tmp_path):
    def change(model):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)

    for kind, other in (TYPES, reversed(TYPES)):
        with sharded(kind):
            run = prepared(make)
            steps(*run)
            adapter_file(run, tmp_path / kind)
            want = run[0].get_state_dict(run[1])
        with sharded(other):
            run = prepared(make)
            change(run[1])
            result = adapter_file(run, tmp_path / kind, save=False)
            got = run[0].get_state_dict(run[1])
        assert not result.missing_keys and not result.unexpected_keys
        for name in want if rank == 0 else ():
            of_adapters = "lora" in name or "modules_to_save" in name
            assert torch.equal(got[name], want[name] if of_adapters else want[name] + 1.0), name


@pytest.mark.skipif(older("accelerate", "1.8"), reason="its version 2 numbers the optimizer's state")
@ranks(2)
@pytest.mark.parametrize("kind", TYPES)
def test_adapters_go_from_stock_fsdp2_to_shardkit_and_back(rank, world, kind, tmp_path):
    stock, ours = {"fsdp2": True, "FSDP_STATE_DICT_TYPE": kind}, {"shardkit": True, "FSDP_STATE_DICT_TYPE": kind}
    for number, (first, second) in enumerate([(stock, ours), (ours, stock)]):
        with accelerate(**first):
            run = prepared(with_head)
            steps(*run)
            adapter_file(run, tmp_path / f"{number}")
            run[0].save_state(tmp_path / f"whole{number}")
            want = steps(*run)
        with accelerate(**second):
            run = prepared(with_head)
            run[0].load_state(tmp_path / f"whole{number}")
            close(steps(*run), want)
            adapter_file(run, tmp_path / f"{number}", save=False)
            again = steps(*run)
        assert again[1] == pytest.approx(want[1], abs=5e-5)  # the first loss: the same weights, the optimizer went on


@ranks(2, timeout=120.0)
def test_ranks_generate_different_lengths_from_adapters(rank, world, tmp_path):
    def generate(model):
        prompt = token_rows()[rank : rank + 1, : 4 + 3 * rank]
        return model.generate(input_ids=prompt, max_new_tokens=3 + 4 * rank, do_sample=False, eos_token_id=None)

    with accelerate():
        theirs = trainer(tmp_path, lora, save_strategy="no")
        theirs.train()
        want = generate(theirs.model)
    with sharded("SHARDED_STATE_DICT"):
        ours = trainer(tmp_path, lora, save_strategy="no")
        ours.train()
        assert torch.equal(generate(ours.model), want)
        given = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": NOT_REENTRANT}
        loaded = trainer(tmp_path, lora, save_strategy="no", **given)
        loaded.train()
        close(logged(loaded), logged(theirs))
        assert torch.equal(generate(loaded.model), want)


@ranks(2, timeout=120.0)
@pytest.mark.parametrize("kind", TYPES)
def test_the_best_adapters_are_loaded_at_the_end(rank, world, kind, tmp_path):
    given = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "learning_rate": 0.3, "seed": 3}
    given |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False}
    with accelerate():
        theirs = trainer(tmp_path / "ddp", lora, **given)
        theirs.train()
    with sharded(kind):
        ours = trainer(tmp_path / "ours", lora, **given)
        ours.train()
        last = [entry["eval_loss"] for entry in ours.state.log_history if "eval_loss" in entry]
        assert ours.state.best_metric == min(last) < last[-1]
        assert ours.state.best_global_step == theirs.state.best_global_step
        assert ours.evaluate()["eval_loss"] == pytest.approx(min(last), abs=1e-6)


@ranks(2, timeout=120.0)
@pytest.mark.parametrize("kind", TYPES)
def test_a_learned_prompt_trains_resumes_and_is_saved_whole(rank, world, kind, tmp_path):
    from peft import PeftModel, PromptTuningConfig, get_peft_model

    def prompt():
        torch.manual_seed(0)
        return get_peft_model(tiny_llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5))

    with accelerate():
        theirs = trainer(tmp_path / "ddp", prompt)
        theirs.train()
    with sharded(kind):
        ours = trainer(tmp_path / "ours", prompt)
        ours.train()
        close(logged(ours), logged(theirs))
        ours.save_model(tmp_path / "final")
        loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path / "final")
        torch.testing.assert_close(logits(loaded), logits(ours.model), rtol=1e-5, atol=1e-5)
        resumed = trainer(tmp_path / "ours", prompt)
        resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
        assert logged(resumed, 3) == logged(ours, 3)


@ranks(2)
@pytest.mark.parametrize("kind", TYPES)
def test_what_a_checkpoint_of_adapters_does_not_have_is_named(rank, world, kind, tmp_path):
    from shardkit.errors import ConfigError

    def elsewhere():
        return lora(target_modules=["o_proj"])

    with sharded(kind):
        adapter_file(prepared(lora), tmp_path)
        with pytest.warns(UserWarning, match="second.*which keep their values"):
            result = adapter_file(prepared(both_adapters), tmp_path, save=False)
        assert result.missing_keys and all("second" in name for name in result.missing_keys)
        adapter_file(prepared(both_adapters), tmp_path / "both")  # with another adapter active than when it is loaded
        run = prepared(two_adapters)
        if kind == "SHARDED_STATE_DICT":  # where the active one has peft's names, which do not say which it was
            with pytest.warns(UserWarning, match="default.*which keep their values"):
                result = adapter_file(run, tmp_path / "both", save=False)
            assert result.missing_keys and all("default" in name for name in result.missing_keys)
        else:
            assert not adapter_file(run, tmp_path / "both", save=False).missing_keys
        with pytest.raises(ConfigError, match="has nothing of what this model trains .*o_proj"):
            adapter_file(prepared(elsewhere), tmp_path, save=False)
