"""TRL's trainers under shardkit: the numbers of DDP, with reference models sharded like the model that is trained."""

import random

import pytest
import torch
import torch.distributed as dist

from tests.accelerate_runs import accelerate, tiny_llama
from tests.harness import ranks
from tests.ranks.test_accelerate_peft import close, logged

pytest.importorskip("trl")
pytest.importorskip("datasets")

WORDS = "the a cat dog bird sat ran flew on under over mat tree house and then it was happy small big red".split()


def tokenizer():
    """One word, one token; made here, so that nothing is downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    marks = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, **marks)


def sentence(generator, low=3, high=9):
    return " ".join(generator.choices(WORDS, k=generator.randint(low, high)))


def texts(folder, *columns, count=32):
    """A data set in files, which all ranks see: what the first one computes of it, the others read."""
    from datasets import Dataset, load_from_disk

    generator = random.Random(5)
    made = Dataset.from_dict({name: [sentence(generator) for _ in range(count)] for name in columns})
    return load_from_disk(once(folder / "texts", made.save_to_disk))


def once(path, save):
    """What the first rank saves, for all."""
    path = str(path)
    if dist.get_rank() == 0:
        save(path)
    dist.barrier()
    return path


def model(seed=0):
    return tiny_llama(seed, vocab_size=64)


def reference():
    return model(seed=7)


def lora():
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")


def adapted():
    """A model that comes with an adapter, of which TRL keeps a frozen copy: two adapters, one for reference."""
    from peft import get_peft_model

    torch.manual_seed(0)
    return get_peft_model(model(), lora())


def config(cls, folder, **changes):
    arguments = {
        "max_steps": 4, "save_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2, "learning_rate": 5e-3,
        "report_to": "none", "disable_tqdm": True, "bf16": False, "dataloader_pin_memory": False,
    }  # fmt: skip
    return cls(output_dir=str(folder), **arguments | changes)


def sft(folder, peft=None, **changes):
    from trl import SFTConfig, SFTTrainer

    torch.manual_seed(0)
    arguments = config(SFTConfig, folder, max_length=24, **changes)
    return SFTTrainer(
        model(), args=arguments, train_dataset=texts(folder, "text"), processing_class=tokenizer(),
        peft_config=peft and peft(),
    )  # fmt: skip


def dpo(folder, peft=None, ref=reference, model=model, **changes):
    from trl import DPOConfig, DPOTrainer

    torch.manual_seed(0)
    arguments = config(DPOConfig, folder, max_length=24, **changes)
    return DPOTrainer(
        model(), ref and ref(), args=arguments, train_dataset=texts(folder, "prompt", "chosen", "rejected"),
        processing_class=tokenizer(), peft_config=peft and peft(),
    )  # fmt: skip


def length(completions, **kwargs):
    return [float(len(set(text.split()))) for text in completions]


def grpo(folder, peft=None, **changes):
    from trl import GRPOConfig, GRPOTrainer

    torch.manual_seed(0)
    given = {"num_generations": 2, "max_completion_length": 6, "beta": 0.1, "temperature": 1.0, "max_steps": 2}
    arguments = config(GRPOConfig, folder, **given | changes)
    return GRPOTrainer(
        once(folder / "model", model().save_pretrained), reward_funcs=length, args=arguments,
        train_dataset=texts(folder, "prompt"), processing_class=tokenizer(), peft_config=peft and peft(),
    )  # fmt: skip


def both(make, tmp_path, kind="SHARDED_STATE_DICT", **given):
    """(DDP's trainer, ours), trained. Names in capitals are variables for ours."""
    variables = {name: given.pop(name) for name in [*given] if name.isupper()}
    with accelerate():
        theirs = make(tmp_path / "ddp", **given)
        theirs.train()
    with accelerate(shardkit=True, FSDP_STATE_DICT_TYPE=kind, **variables):
        ours = make(tmp_path / "ours", **given)
        ours.train()
    return theirs, ours


def differences(given):
    return "-".join(given) or "plain"


SFT = [
    {},
    {"peft": lora},
    {"packing": True, "gradient_checkpointing": False},
    {"gradient_accumulation_steps": 2, "gradient_checkpointing": False, "kind": "FULL_STATE_DICT"},
    {"peft": lora, "kind": "FULL_STATE_DICT"},
]


@ranks(2, timeout=180.0)
@pytest.mark.parametrize("given", SFT, ids=differences)
def test_supervised_fine_tuning_has_the_numbers_of_ddp_and_resumes(rank, world, given, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    kind = given.pop("kind", "SHARDED_STATE_DICT")
    theirs, ours = both(sft, tmp_path, kind, **given)
    close(logged(ours), logged(theirs))
    assert len(logged(ours)) == 8
    with accelerate(shardkit=True, FSDP_STATE_DICT_TYPE=kind):
        resumed = sft(tmp_path / "ours", **given)
        resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
        assert logged(resumed, 3) == logged(ours, 3)
        resumed.save_model(tmp_path / "final")
    if "peft" in given:
        loaded = PeftModel.from_pretrained(model(), tmp_path / "final")
    else:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    row = torch.arange(3, 15)[None]
    with torch.no_grad():
        got, want = loaded.eval()(input_ids=row).logits, theirs.model.eval()(input_ids=row).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


DPO = [
    {},
    {"sync_ref_model": True, "ref_model_sync_steps": 2},
    {"sync_ref_model": True, "ref_model_sync_steps": 2, "SHARDKIT_OPTIONS": '{"sharding_strategy": "zero2"}'},
    {"precompute_ref_log_probs": True},
    {"peft": lora, "ref": None},
    {"model": adapted, "ref": None},
]


@ranks(2, timeout=180.0)
@pytest.mark.parametrize("given", DPO, ids=differences)
def test_preference_optimisation_has_the_numbers_of_ddp(rank, world, given, tmp_path):
    from shardkit.accelerate.preparing import is_sharded

    theirs, ours = both(dpo, tmp_path, **given)
    close(logged(ours), logged(theirs))
    assert len(logged(ours)) == 8
    keys = ["rewards/chosen", "rewards/rejected", "logps/chosen"]
    for mine, other in zip(ours.state.log_history, theirs.state.log_history):
        for key in keys:
            assert mine.get(key) == pytest.approx(other.get(key), abs=1e-4), key
    if ours.ref_model is not None:
        assert is_sharded(ours.ref_model) and not ours.ref_model.training
        there = sum(p.numel() for p in ours.ref_model.parameters())
        assert there < 0.6 * sum(p.numel() for p in model().parameters())
    else:  # the reference is in the model: its base, or a frozen adapter
        with accelerate(shardkit=True):
            resumed = dpo(tmp_path / "ours", **given)
            resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
            assert logged(resumed, 3) == logged(ours, 3)


@ranks(2, timeout=180.0)
@pytest.mark.parametrize("given", [{}, {"peft": lora}], ids=differences)
def test_policy_optimisation_generates_and_has_the_numbers_of_ddp(rank, world, given, tmp_path):
    theirs, ours = both(grpo, tmp_path, save_strategy="no", **given)
    close(logged(ours), logged(theirs))
    assert len(logged(ours)) == 4
