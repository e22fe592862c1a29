"""transformers' Trainer: the numbers of DDP, what it saves, and what stock FSDP gets wrong there."""

import contextlib
import json
import os
import time
import unittest.mock
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.accelerate_runs import accelerate, older, recomputed_llama, tiny_llama, token_rows
from tests.harness import ranks, run_ranks
from tests.ranks.test_accelerate import close

EXAMPLES = Path(__file__).parents[2] / "examples"
KINDS = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]


def rows(count=32, seed=1):
    """Texts of one length, of which every row has another number of labels: means over tokens and over rows differ."""
    out = []
    for number, row in enumerate(token_rows(count, seed=seed)):
        labels = row.clone()
        labels[: number * 5 % 9] = -100
        out.append({"input_ids": row, "labels": labels})
    return out


def arguments(folder, **changes):
    from transformers import TrainingArguments

    chosen = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "max_steps": 4,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "log_level": "error",
        "dataloader_pin_memory": False, "per_device_eval_batch_size": 4,
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **chosen | changes)


def trainer_of(folder, make=tiny_llama, kind=None, callbacks=None, **changes):
    from transformers import Trainer
    from transformers.trainer_callback import PrinterCallback

    args = arguments(folder, **changes)
    trainer = (kind or Trainer)(
        model=make(), args=args, train_dataset=rows(), eval_dataset=rows(10, seed=5), callbacks=callbacks
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def trained(folder, resume=None, **changes):
    trainer = trainer_of(folder, **changes)
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer


def curve(trainer, since=0):
    """Losses, gradient norms and learning rates of every step, and the losses of evaluations, as they were logged."""
    keys = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return [log[key] for log in trainer.state.log_history if log["step"] > since for key in keys if key in log]


def tied_llama(**changes):
    return tiny_llama(tie_word_embeddings=True, **changes)


@contextlib.contextmanager
def stock_version_2():
    """What stock FSDP2 makes of it, to compare with. The Trainer of transformers 4.50 prepares the model alone, which
    Accelerate's version 2 refuses: it has nothing to compare, and the rest of the block is left out."""
    try:
        with accelerate(fsdp2=True):
            yield
    except ValueError as error:
        if not older("transformers", "5.0") or "must be passed together" not in str(error):
            raise


@contextlib.contextmanager
def nothing_exported():
    """What a script finds that torchrun started, without `accelerate launch` and its YAML."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FSDP_", "ACCELERATE_"))}
    with unittest.mock.patch.dict(os.environ, kept, clear=True):
        yield


def everywhere(value):
    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


# --------------------------------------------------------------------------------------------------- numbers of DDP


@ranks(2, timeout=180.0)
@pytest.mark.parametrize(("changes", "settings"), [
    ({"eval_strategy": "steps", "eval_steps": 2, "average_tokens_across_devices": True}, {}),
    ({"gradient_checkpointing": True}, {}),
    ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, {}),
    ({"make": recomputed_llama}, {"FSDP_ACTIVATION_CHECKPOINTING": "true"}),
    ({"optim": "adamw_torch", "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2}, {}),
    ({"optim": "adamw_torch_fused", "max_grad_norm": 0.2}, {}),
    ({"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "max_steps": 6}, {}),  # 4.50 logs no norms then
    ({"optim": "adagrad"}, {}),
    ({"optim": "rmsprop"}, {}),
    ({"average_tokens_across_devices": False, "gradient_accumulation_steps": 1},
     {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}),
    ({"make": tied_llama}, {"SHARDKIT_OPTIONS": '{"no_sync": true}'}),
    # 6 batches an epoch: a step of 4 and one of 2. Transformers 4.50 counts one, and ends in the middle of the data.
    ({"num_train_epochs": 4, "max_steps": -1, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 4}, {}),
], ids=str)  # fmt: skip
def test_losses_norms_and_learning_rates_are_those_of_ddp(rank, world, changes, settings, tmp_path):
    with accelerate():
        theirs = trained(tmp_path, **changes)
    with accelerate(shardkit=True, **settings):
        ours = trained(tmp_path, **changes)
        assert sum(p.numel() for p in ours.model.parameters()) < 0.6 * ours.model.num_parameters()
    close(curve(ours), curve(theirs))
    assert len(curve(ours)) >= 12
    assert ours.state.total_flos == theirs.state.total_flos


@ranks(2, timeout=180.0)
def test_labels_are_shifted_before_they_are_smoothed(rank, world, tmp_path):
    """The Trainer knows a causal language model by its class's name, which stock FSDP2 changes."""
    settings = {"label_smoothing_factor": 0.1, "eval_strategy": "steps", "eval_steps": 2}
    with accelerate():
        theirs = curve(trained(tmp_path, **settings))
    with accelerate(shardkit=True):
        close(curve(trained(tmp_path, **settings)), theirs)
    with stock_version_2():
        stock = curve(trained(tmp_path, **settings))
        assert abs(stock[0] - theirs[0]) > 0.01, "stock version 2 shifts labels now"


@ranks(2, timeout=180.0)
def test_a_model_that_trains_with_labels_of_its_own_and_generates(rank, world, tmp_path):
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    def run():
        args = Seq2SeqTrainingArguments(
            str(tmp_path), max_steps=3, learning_rate=1e-2, per_device_train_batch_size=2, per_device_eval_batch_size=2,
            predict_with_generate=True, generation_max_length=9, save_strategy="no", logging_steps=1, report_to="none",
            disable_tqdm=True, log_level="error",
        )  # fmt: skip
        trainer = Seq2SeqTrainer(model=tiny_t5(), args=args, train_dataset=rows())
        trainer.train()
        predicted = trainer.predict(rows(7, seed=5))
        return [*curve(trainer), predicted.metrics["test_loss"]], predicted.predictions.tolist()

    with accelerate():
        losses, texts = run()
    with accelerate(shardkit=True):
        ours, generated = run()
    close(ours, losses)
    assert generated == texts


def tiny_t5():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


@ranks(2, timeout=180.0)
def test_bf16_computes_low_and_returns_losses_in_float32(rank, world, tmp_path):
    with accelerate():
        theirs = trained(tmp_path, bf16=True, use_cpu=True)
    with accelerate(shardkit=True):
        ours = trained(tmp_path, bf16=True, use_cpu=True)
        loss = loss_of(ours)
        assert loss.dtype == torch.float32 and loss != loss.bfloat16()
    with stock_version_2():
        loss = loss_of(trained(tmp_path, bf16=True, use_cpu=True))
        assert loss == loss.bfloat16(), "stock version 2 rounds the loss no longer"
    close(curve(ours), curve(theirs), digits=1)
    close(curve(ours)[::3], curve(theirs)[::3], digits=2)


def loss_of(trainer):
    batch = token_rows(4)
    return trainer.model(input_ids=batch, labels=batch).loss.detach()


WORD = {"version": "shardkit"}
NO_PREFETCH = "NO_PREFETCH" if older("transformers", "5.0") else False  # which take nothing but text there
WAYS = [
    # TrainingArguments, install(always=), options of shardkit that must come out of it
    ({"fsdp": True, "fsdp_config": WORD}, False, {"sharding_strategy": "FULL_SHARD"}),
    ({"fsdp": True, "fsdp_config": {"fsdp_version": "shardkit", "fsdp_reshard_after_forward": False}}, False,
     {"sharding_strategy": "FULL_SHARD", "reshard_after_forward": False}),
    ({"fsdp": True, "fsdp_config": {**WORD, "sharding_strategy": "zero2", "activation_checkpointing": 0.5,
                                    "activation_offload": True, "backward_prefetch": NO_PREFETCH}}, False,
     {"sharding_strategy": "zero2", "activation_checkpointing": 0.5, "activation_offload": True,
      "backward_prefetch": False}),
    ({"fsdp": True, "fsdp_config": {**WORD, "sharding_strategy": "SHARD_GRAD_OP", "backward_prefetch": "backward_pre",
                                    "forward_prefetch": "true", "use_orig_params": "true",
                                    "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}}, False,
     {"sharding_strategy": "SHARD_GRAD_OP"}),
    ({"fsdp": True, "fsdp_config": {**WORD, "reshard_after_forward": "shard_grad_op",
                                    "backward_prefetch": "NO_PREFETCH", "sync_module_states": "false"}}, False,
     {"sharding_strategy": "SHARD_GRAD_OP", "backward_prefetch": False, "sync_module_states": False}),
    ({"fsdp": True, "fsdp_config": {**WORD, "min_num_params": 5000, "auto_wrap_policy": "SIZE_BASED_WRAP",
                                    "cpu_offload": True}}, False, {"sharding_strategy": "FULL_SHARD"}),
    ({"fsdp": "shard_grad_op auto_wrap", "fsdp_config": WORD}, False, {"sharding_strategy": "SHARD_GRAD_OP"}),
    ({"fsdp": "no_shard", "fsdp_config": WORD}, False, {"sharding_strategy": "NO_SHARD"}),
    ({"fsdp": "full_shard auto_wrap"}, True, {"sharding_strategy": "FULL_SHARD"}),
    ({"fsdp": ["shard_grad_op", "auto_wrap", "offload"]}, True, {"sharding_strategy": "SHARD_GRAD_OP"}),
    ({"fsdp": True}, True, {"sharding_strategy": "FULL_SHARD"}),
    ({"fsdp": True, "fsdp_config": {"sharding_strategy": "zero1"}}, True, {"sharding_strategy": "zero1"}),
    ({"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 1, "activation_checkpointing": True,
                                                      "backward_prefetch": "backward_post"}}, True,
     {"sharding_strategy": "FULL_SHARD", "activation_checkpointing": True}),
    ({"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": False}}, True,
     {"reshard_after_forward": False}),
]  # fmt: skip


@ranks(2, timeout=180.0)
@pytest.mark.parametrize("number", range(len(WAYS)))
def test_every_way_in_trains_with_shardkit(rank, world, number, tmp_path):
    """And so do the arguments that come back from what the Trainer saves of them."""
    from transformers import Trainer, TrainingArguments

    given, always, options = WAYS[number]
    if number % 2 and "fsdp_config" in given:
        path = tmp_path / f"fsdp{rank}.json"
        path.write_text(json.dumps(given["fsdp_config"]))
        given = {**given, "fsdp_config": str(path)}
    with accelerate():
        theirs = trained(tmp_path)
    with accelerate(shardkit=True, always=always), nothing_exported():
        ours = trained(tmp_path, make=recomputed_llama, **given)
        plugin = ours.accelerator.state.fsdp_plugin
        assert type(plugin).__name__ == "ShardkitPlugin"
        assert {key: plugin.wrap_options.get(key) for key in options} == options
        saved = json.dumps(ours.args.to_dict())
    close(curve(ours), curve(theirs))
    with accelerate(shardkit=True, always=always), nothing_exported():
        again = Trainer(model=tiny_llama(), args=TrainingArguments(**json.loads(saved))).accelerator.state.fsdp_plugin
        assert again is not plugin and settings_of(again) == settings_of(plugin)


def settings_of(plugin):
    return {name: value for name, value in vars(plugin).items() if not callable(value)}


@ranks(2)
def test_settings_that_nobody_reads_are_named(rank, world, tmp_path):
    with accelerate(shardkit=True), nothing_exported(), pytest.warns(UserWarning, match="has sharding_stategy, which"):
        trainer_of(tmp_path, fsdp=True, fsdp_config={"version": "shardkit", "sharding_stategy": "zero2"})


# ---------------------------------------------------------------------------------------------- evaluate and predict


@ranks(2, timeout=180.0)
def test_evaluate_and_predict_before_train_and_a_second_train(rank, world, tmp_path):
    """Stock DDP takes a model that was evaluated for prepared, and goes on without any synchronisation of gradients;
    the reference is not evaluated first."""

    def seen(trainer):
        predicted = trainer.predict(rows(9, seed=6))
        assert predicted.predictions.shape == (9, 12, 96)
        size = float(abs(predicted.predictions).sum())
        return [trainer.evaluate()["eval_loss"], predicted.metrics["test_loss"], size]

    def run(evaluate_first):
        trainer = trainer_of(tmp_path)
        out = seen(trainer) if evaluate_first else []
        for _ in range(2):
            trainer.train()
            out += curve(trainer) + seen(trainer)
        return out

    with accelerate():
        theirs = seen(trainer_of(tmp_path))
    with accelerate():
        theirs += run(evaluate_first=False)
    with accelerate(shardkit=True):
        ours = run(evaluate_first=True)
    close(ours, theirs)
    with accelerate(fsdp2=True), pytest.raises(ValueError, match="optimizer"):
        trainer_of(tmp_path).evaluate()


@ranks(2, timeout=180.0)
def test_a_compiled_model_is_evaluated_before_it_is_trained(rank, world, tmp_path):
    settings = {"max_steps": 2, "gradient_accumulation_steps": 1}
    with accelerate():
        theirs = trained(tmp_path, **settings)
    with accelerate(shardkit=True):
        ours = trainer_of(tmp_path, torch_compile=True, torch_compile_backend="eager", **settings)
        first = ours.evaluate()["eval_loss"]
        ours.train()
        close(curve(ours), curve(theirs))
        assert type(ours.model).__name__ == "OptimizedModule"
        assert ours.evaluate()["eval_loss"] != first


@ranks(2, timeout=180.0)
def test_a_model_for_every_call_of_train(rank, world, tmp_path):
    from transformers import Trainer

    settings = {"save_strategy": "steps", "save_steps": 2}
    with accelerate(shardkit=True):
        ours = Trainer(model_init=lambda: tiny_llama(), args=arguments(tmp_path, **settings), train_dataset=rows())
        ours.train()
        first = curve(ours)
        ours.train()
        assert curve(ours) == first
        ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert curve(ours) == first


@ranks(2, timeout=180.0)
def test_a_batch_size_that_fits_is_found(rank, world, tmp_path):
    """Memory runs out in the middle of a forward, and then in a backward, on all ranks."""

    def make():
        model, tries = tiny_llama(), []

        def too_much(module, grad):
            raise RuntimeError("CUDA out of memory.")

        def check(module, args, output):
            if model.training and len(output) > 4:
                tries.append(len(output))
                too_much(None, None) if len(tries) == 1 else output.register_hook(lambda grad: too_much(None, None))

        model.model.layers[0].mlp.register_forward_hook(check)
        return model

    def run(**changes):
        trainer = trained(tmp_path, auto_find_batch_size=True, gradient_accumulation_steps=1, **changes)
        return [*curve(trainer), trainer.evaluate()["eval_loss"]], trainer._train_batch_size

    with accelerate(shardkit=True):
        ours, size = run(per_device_train_batch_size=6, make=make)
        assert size <= 4
    with accelerate(shardkit=True):
        assert run(per_device_train_batch_size=size) == (ours, size)


@ranks(2, timeout=180.0)
def test_generation_of_unequal_lengths_while_training(rank, world, tmp_path):
    from transformers import TrainerCallback

    class Generate(TrainerCallback):
        texts = []

        def on_step_end(self, args, state, control, model, **kwargs):
            model = getattr(model, "module", model)
            model.eval()
            prompt = token_rows(1, 3 + 4 * rank)
            self.texts += model.generate(prompt, max_new_tokens=3 + 5 * rank, do_sample=False).tolist()
            model.train()

    def run():
        Generate.texts = []
        trained(tmp_path, callbacks=[Generate()])
        return Generate.texts

    with accelerate():
        theirs = run()
    with accelerate(shardkit=True):
        assert run() == theirs
    assert len({len(text) for texts in everywhere(theirs) for text in texts}) > 1


# ------------------------------------------------------------------------------------------------ save and resume


@ranks(2, timeout=180.0)
@pytest.mark.parametrize("kind", KINDS)
def test_training_that_resumes_goes_on_exactly(rank, world, kind, tmp_path):
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "cosine"}
    with accelerate(shardkit=True, FSDP_STATE_DICT_TYPE=kind):
        whole = trained(tmp_path, **settings)
        state = optimizer_state(whole)
    with accelerate(shardkit=True, FSDP_STATE_DICT_TYPE=kind):
        again = trained(tmp_path, make=lambda: tiny_llama(seed=7), resume=tmp_path / "checkpoint-3", **settings)
        assert curve(again, since=3) == curve(whole, since=3)
        loaded = optimizer_state(again)
        assert loaded.keys() == state.keys() and all(torch.equal(loaded[key], state[key]) for key in state)
        assert len(state) == 3 * len(list(tiny_llama().parameters()))
    other = next(other for other in KINDS if other != kind)
    with accelerate(shardkit=True, FSDP_STATE_DICT_TYPE=other):
        again = trained(tmp_path, make=lambda: tiny_llama(seed=7), resume=tmp_path / "checkpoint-3", **settings)
        assert curve(again, since=3) == curve(whole, since=3)


def optimizer_state(trainer):
    state = trainer.optimizer.state_dict()["state"]
    return {(number, key): value.clone() for number, values in state.items() for key, value in values.items()}


@ranks(2, timeout=180.0)
def test_a_checkpoint_of_ddp_resumes(rank, world, tmp_path):
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    with accelerate():
        theirs = trained(tmp_path, **settings)
    with accelerate(shardkit=True):
        ours = trained(tmp_path, make=lambda: tiny_llama(seed=7), resume=tmp_path / "checkpoint-3", **settings)
    close(curve(ours, since=3), curve(theirs, since=3))


def train_on(rank, world, folder, resume=None, **changes):
    """Means over the tokens of all ranks, the default since transformers 5, are the same on any number of them."""
    with accelerate(shardkit=True):
        settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "average_tokens_across_devices": True}
        return curve(trained(folder, resume=resume, **settings, **changes), since=3)


def test_twice_as_many_ranks_resume(tmp_path):
    """With fewer micro-batches each, not smaller ones: transformers 4.50 goes on with the size in the checkpoint."""
    want = run_ranks(train_on, 2, tmp_path, gradient_accumulation_steps=4, timeout=180.0)[0]
    got = run_ranks(train_on, 4, tmp_path, tmp_path / "checkpoint-3", gradient_accumulation_steps=2, timeout=180.0)[0]
    close(got, want)


@ranks(2, timeout=180.0)
@pytest.mark.parametrize("kind", KINDS)
def test_the_best_model_is_loaded_at_the_end_on_all_ranks(rank, world, kind, tmp_path):
    settings = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    settings["save_total_limit"] = 2
    with accelerate(shardkit=True, FSDP_STATE_DICT_TYPE=kind):
        ours = trained(tmp_path, load_best_model_at_end=True, learning_rate=5e-2, **settings)
        losses = [log["eval_loss"] for log in ours.state.log_history if "eval_loss" in log]
        best = losses.index(min(losses)) + 1
        assert best < 6, "the last is the best: nothing to load"
        assert everywhere(ours.state.best_model_checkpoint) == [str(tmp_path / f"checkpoint-{best}")] * world
        assert ours.evaluate()["eval_loss"] == min(losses)


@ranks(2, timeout=180.0)
def test_ranks_agree_about_the_best_checkpoint_however_late_one_of_them_looks(rank, world, tmp_path):
    """Stock looks whether a folder is there that another rank may be about to make."""
    from transformers import trainer as module

    class Late:
        def __getattr__(self, name):
            return getattr(dist, name)

        def barrier(self):
            dist.barrier()
            waited = 0
            while rank == 1 and not list(folder.glob("checkpoint-*")) and waited < 1000:
                time.sleep(0.01)
                waited += 1

    def best():
        settings = {"max_steps": 1, "eval_strategy": "steps", "save_strategy": "steps", "save_steps": 1}
        with unittest.mock.patch.object(module, "dist", Late()):
            trainer = trained(folder, metric_for_best_model="loss", **settings)
        return everywhere(trainer.state.best_model_checkpoint)

    folder = tmp_path / "ours"
    with accelerate(shardkit=True):
        assert best() == [str(folder / "checkpoint-1")] * world
    folder = tmp_path / "stock"
    with stock_version_2():
        assert best() == [None, str(folder / "checkpoint-1")], "stock ranks agree now"


@ranks(2, timeout=180.0)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [tiny_llama, tied_llama])
def test_save_model_writes_what_from_pretrained_loads(rank, world, kind, make, tmp_path):
    from transformers import AutoModelForCausalLM

    with accelerate(shardkit=True, FSDP_STATE_DICT_TYPE=kind):
        ours = trained(tmp_path, make=make)
        ours.save_model()
        loss = ours.evaluate()["eval_loss"]
    with accelerate(shardkit=True):
        loaded = trainer_of(tmp_path, make=lambda: AutoModelForCausalLM.from_pretrained(tmp_path))
        assert loaded.evaluate()["eval_loss"] == loss
    with accelerate():
        loaded = trainer_of(tmp_path, make=lambda: AutoModelForCausalLM.from_pretrained(tmp_path))
        assert loaded.evaluate()["eval_loss"] == pytest.approx(loss, abs=1e-6)
    assert torch.load(tmp_path / "training_args.bin", weights_only=False).max_steps == 4
    if make is tiny_llama and kind == "SHARDED_STATE_DICT":
        with stock_version_2():
            stock = trained(tmp_path / "stock")
            stock.save_model()
            assert not (tmp_path / "stock").exists() or not [*(tmp_path / "stock").glob("*.safetensors")]


@ranks(2, timeout=180.0)
def test_switching_to_full_state_after_sharded_training(rank, world, tmp_path):
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    with accelerate(shardkit=True):
        ours = trained(tmp_path, **settings)
        ours.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        ours.save_model(str(tmp_path / "final"))
        ours.accelerator.save_state(str(tmp_path / "state"))
        loss = ours.evaluate()["eval_loss"]
        ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        assert ours.evaluate()["eval_loss"] == loss
        ours._load_from_checkpoint(str(tmp_path / "checkpoint-3"))
        ours.accelerator.load_state(str(tmp_path / "state"))
        assert ours.evaluate()["eval_loss"] == loss




@ranks(2, timeout=180.0)
@pytest.mark.parametrize("kind", KINDS)
def test_save_model_before_anything_was_prepared(rank, world, kind, tmp_path):
    from transformers import AutoModelForCausalLM

    with accelerate(shardkit=True, FSDP_STATE_DICT_TYPE=kind):
        trainer_of(tmp_path).save_model()
        got = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(got[k], v) for k, v in tiny_llama().state_dict().items())


@ranks(2, timeout=180.0)
def test_weights_in_several_files(rank, world, tmp_path):
    """What a model that is too large for one file is saved as: the index, and resuming from DDP's."""
    from transformers import PreTrainedModel

    def save(self, *args, **kwargs):
        return stock(self, *args, **{**kwargs, "max_shard_size": "20KB"})

    def index(folder):
        return json.loads((folder / "model.safetensors.index.json").read_text())

    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    stock = PreTrainedModel.save_pretrained
    with unittest.mock.patch.object(PreTrainedModel, "save_pretrained", save):
        with accelerate():
            theirs = trained(tmp_path, **settings)
        with accelerate(shardkit=True):
            ours = trained(tmp_path, make=lambda: tiny_llama(seed=7), resume=tmp_path / "checkpoint-3", **settings)
            ours.save_model(str(tmp_path / "ours"))
    close(curve(ours, since=3), curve(theirs, since=3))
    assert index(tmp_path / "ours") == index(tmp_path / "checkpoint-3")
