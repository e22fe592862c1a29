"""Raw Accelerate loops: the numbers of DDP, whatever is prepared in whatever order, and what was saved resumes."""

import gc
import weakref

import pytest
import torch
import torch.distributed.algorithms.join
from torch.utils.data import DataLoader

from tests.accelerate_runs import accelerate, older, recomputed_llama, tiny_llama, token_rows
from tests.harness import ranks, run_ranks


def close(ours, theirs, digits=4):
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs):
        assert mine == pytest.approx(other, abs=0.5 * 10**-digits, rel=0.5 * 10**-digits), (ours, theirs)


def numel(model):
    return sum(p.numel() for p in model.parameters())


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
        assert numel(things["model"]) < 0.6 * numel(tiny_llama())
    close(ours, theirs)


@ranks(2, timeout=120.0)
@pytest.mark.parametrize(("settings", "options"), [
    ({"FSDP_RESHARD_AFTER_FORWARD": "false"}, {}),
    ({"FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP", "FSDP_BACKWARD_PREFETCH": "NO_PREFETCH"}, {}),
    ({"FSDP_SHARDING_STRATEGY": "NO_SHARD"}, {}),
    ({"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}, {}),
    ({"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "5000"}, {}),
    ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, {}),
    ({"FSDP_OFFLOAD_PARAMS": "true"}, {}),
    ({}, {"sharding_strategy": "zero1"}),
    ({}, {"sharding_strategy": "zero2", "activation_checkpointing": 0.5, "activation_offload": True}),
    ({}, {"policy": None, "no_sync": True}),
], ids=str)  # fmt: skip
def test_every_setting_trains_the_same(rank, world, settings, options):
    from shardkit.accelerate import ShardkitPlugin

    tied = {"make": tied_llama}
    with accelerate():
        theirs = loop(**tied)[2]
    with accelerate(shardkit=True, **settings):
        plugin = ShardkitPlugin(**options) if options else None
        close(loop(**tied, fsdp_plugin=plugin)[2], theirs)


def tied_llama():
    return recomputed_llama(tie_word_embeddings=True)


@ranks(2, timeout=120.0)
def test_ignored_modules_stay_whole_and_are_clipped_with_the_rest(rank, world):
    with accelerate(shardkit=True, FSDP_IGNORED_MODULES=".*mlp"):
        accelerator, things, _ = loop(accumulation=1)
        model = things["model"]
        assert model.model.layers[0].mlp.up_proj.weight.shape == (64, 32)
        rows = token_rows(2)
        accelerator.backward(model(input_ids=rows, labels=rows).loss)  # the same rows on every rank: the same gradients
        whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
        want = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in whole]))
        assert float(accelerator.clip_grad_norm_(model.parameters(), 1e9)) == pytest.approx(float(want), rel=1e-5)


@ranks(2, timeout=120.0)
def test_bf16_computes_low_and_keeps_losses_reductions_and_masters_in_float32(rank, world):
    with accelerate():
        theirs = loop(precision="bf16")[2]
    with accelerate(shardkit=True):
        accelerator, things, ours = loop(precision="bf16")
        flat = things["model"]._shardkit_step.flats[0]
        assert flat.compute_dtype == torch.bfloat16
        assert flat.reduce_dtype == flat.shard.dtype == torch.float32
    close(ours, theirs, digits=1)  # residual streams are bfloat16 here, float32 under DDP's autocast
    assert any(loss != float(torch.tensor(loss).bfloat16()) for loss in ours[::2])


@ranks(2, timeout=120.0)
def test_a_model_of_bf16_weights_without_mixed_precision_stays_in_bf16(rank, world):
    with accelerate(shardkit=True):
        accelerator, things, _ = loop(make=lambda: tiny_llama().bfloat16())
        assert {p.dtype for p in things["model"].parameters()} == {torch.bfloat16}


@ranks(2, timeout=120.0)
def test_a_gradient_scaler_skips_steps_on_all_ranks_and_unscales_before_clipping(rank, world):
    """Accelerate makes a scaler for fp16 on accelerators only; here the test gives the accelerator one."""

    def run():
        from accelerate import Accelerator

        accelerator = Accelerator()
        accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
        model = tiny_llama()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        out = []
        for number, batch in enumerate(token_rows(24).split(4)):
            loss = model(input_ids=batch[2 * rank : 2 * rank + 2], labels=batch[2 * rank : 2 * rank + 2]).loss
            accelerator.backward(loss)
            if number == 1:
                grad = model.get_input_embeddings().weight.grad
                (grad.to_local() if hasattr(grad, "to_local") else grad).fill_(float("inf") if rank else 0.0)
            norm = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            out += [float(accelerator.gather(loss.detach()[None]).mean()), norm if number != 1 else 0.0]
            out += [float(optimizer.step_was_skipped), accelerator.scaler.get_scale()]
            optimizer.zero_grad()
        return out

    with accelerate(shardkit=True):
        ours = run()
    assert ours[6] == 1.0 and ours[7] == ours[3] / 2, "the step with the infinity was not skipped"
    everyone = [None] * world
    torch.distributed.all_gather_object(everyone, ours)
    assert all(other == ours for other in everyone)


@ranks(2, timeout=120.0)
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_save_state_and_load_state_replay(rank, world, kind, tmp_path):
    with accelerate(shardkit=True, FSDP_STATE_DICT_TYPE=kind):
        accelerator, things, _ = loop()
        accelerator.save_state(str(tmp_path / "state"))
        first = epoch(accelerator, things)
        accelerator.load_state(str(tmp_path / "state"))
        assert epoch(accelerator, things) == first
    with accelerate(shardkit=True):  # a new process would do the same; what is on the disk decides
        accelerator, things, _ = loop(make=lambda: tiny_llama(seed=9))
        accelerator.load_state(str(tmp_path / "state"))
        assert epoch(accelerator, things) == first


@ranks(2, timeout=120.0)
def test_the_newer_state_is_loaded_after_the_kind_was_changed(rank, world, tmp_path):
    with accelerate(shardkit=True):
        accelerator, things, _ = loop()
        for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT", "SHARDED_STATE_DICT"):
            accelerator.state.fsdp_plugin.set_state_dict_type(kind)
            epoch(accelerator, things)
            accelerator.save_state(str(tmp_path / "state"))
            first = epoch(accelerator, things)
            accelerator.load_state(str(tmp_path / "state"))
            assert epoch(accelerator, things) == first


@ranks(2, timeout=120.0)
def test_ranks_may_have_different_numbers_of_batches_as_ddp_lets_them(rank, world):
    from accelerate import Accelerator

    rows = token_rows(5)

    def train(model, optimizer, batches, backward):
        losses = []
        for batch in batches:
            loss = model(input_ids=batch, labels=batch).loss
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        return losses

    ddp = torch.nn.parallel.DistributedDataParallel(tiny_llama())
    mine = [rows[i : i + 1] for i in range(rank, 5, 2)]
    with torch.distributed.algorithms.join.Join([ddp]):
        theirs = train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), mine, lambda loss: loss.backward())
    with accelerate(shardkit=True):
        accelerator = Accelerator()
        model = tiny_llama()
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(rows, batch_size=1)
        )
        with accelerator.join_uneven_inputs([model], even_batches=False):
            ours = train(model, optimizer, loader, accelerator.backward)
        assert loader.batch_sampler.even_batches is True
        assert len(ours) == 3 - rank
        close(ours, theirs)
        whole = accelerator.get_state_dict(model)
    if rank == 0:
        assert all(torch.allclose(whole[name], p, atol=1e-5) for name, p in ddp.module.state_dict().items())


@ranks(2, timeout=120.0)
def test_free_memory_lets_the_model_go(rank, world):
    with accelerate(shardkit=True):
        accelerator, things, _ = loop()
        model = weakref.ref(things["model"])
        things.clear()
        accelerator.free_memory()
        gc.collect()
        assert model() is None


@pytest.mark.skipif(older("accelerate", "1.8"), reason="its version 2 numbers the optimizer's state")
@ranks(2, timeout=120.0)
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("direction", ["stock to shardkit", "shardkit to stock"])
def test_checkpoints_are_exchanged_with_stock_fsdp2(rank, world, kind, direction, tmp_path):
    sides = [{"fsdp2": True}, {"shardkit": True}]
    saver, loader = sides if direction.startswith("stock") else sides[::-1]
    together = "model optimizer loader,scheduler"  # version 2 takes model and optimizer in one call
    with accelerate(**saver, FSDP_STATE_DICT_TYPE=kind):
        accelerator, things, _ = loop(together)
        accelerator.save_state(str(tmp_path / "state"))
        want = epoch(accelerator, things)
    with accelerate(**loader, FSDP_STATE_DICT_TYPE=kind):
        accelerator, things, _ = loop(together, make=lambda: tiny_llama(seed=9))
        accelerator.load_state(str(tmp_path / "state"))
        close(epoch(accelerator, things), want)


@ranks(2, timeout=120.0)
def test_a_checkpoint_of_ddp_resumes(rank, world, tmp_path):
    with accelerate():
        accelerator, things, _ = loop()
        accelerator.save_state(str(tmp_path / "state"))
        want = epoch(accelerator, things)
    with accelerate(shardkit=True):
        accelerator, things, _ = loop(make=lambda: tiny_llama(seed=9))
        accelerator.load_state(str(tmp_path / "state"))
        close(epoch(accelerator, things), want)


def save_for_resume(rank, world, folder):
    with accelerate(shardkit=True):
        accelerator, things, _ = loop()
        accelerator.save_state(folder)
        return evaluated(accelerator, things["model"])


def resume(rank, world, folder):
    with accelerate(shardkit=True):
        accelerator, things, _ = loop(make=lambda: tiny_llama(seed=9))
        accelerator.load_state(folder)
        return evaluated(accelerator, things["model"])


def evaluated(accelerator, model):
    rows = token_rows(4)
    with torch.no_grad():
        return float(model(input_ids=rows, labels=rows).loss)


def test_a_checkpoint_resumes_on_another_number_of_ranks(tmp_path):
    want = run_ranks(save_for_resume, 2, str(tmp_path / "state"), timeout=120.0)
    got = run_ranks(resume, 4, str(tmp_path / "state"), timeout=120.0)
    close([*got], [want[0]] * 4, digits=6)


@ranks(2, timeout=120.0)
def test_the_whole_model_is_saved_and_read_by_from_pretrained(rank, world, tmp_path):
    from transformers import LlamaForCausalLM

    with accelerate(shardkit=True):
        accelerator, things, _ = loop(make=tied_llama)
        model = accelerator.unwrap_model(things["model"])
        want = evaluated(accelerator, model)
        state = accelerator.get_state_dict(things["model"])
        assert bool(state) == (rank == 0)
        accelerator.save_model(things["model"], str(tmp_path / "weights"))
        folder = str(tmp_path / "pretrained")
        model.save_pretrained(folder, is_main_process=accelerator.is_main_process, state_dict=state)
        accelerator.wait_for_everyone()
        again = LlamaForCausalLM.from_pretrained(folder)
        assert again.config.architectures == ["LlamaForCausalLM"]
        assert evaluated(accelerator, again) == pytest.approx(want, abs=1e-6)
        from safetensors.torch import load_file

        weights = load_file(str(tmp_path / "weights" / "model.safetensors"))
        names = set(dict(again.named_parameters()))
        assert set(weights) == names and all(torch.equal(weights[n], p) for n, p in again.named_parameters())


@ranks(2, timeout=120.0)
def test_merge_weights_reads_a_sharded_checkpoint(rank, world, tmp_path):
    from accelerate.utils import merge_fsdp_weights

    with accelerate(shardkit=True):
        accelerator, things, _ = loop()
        accelerator.save_state(str(tmp_path / "state"))
        state = accelerator.get_state_dict(things["model"])
        merge_fsdp_weights(str(tmp_path / "state" / "pytorch_model_fsdp_0"), str(tmp_path / "merged"))
        if rank == 0:
            from safetensors.torch import load_file

            merged = load_file(str(tmp_path / "merged" / "model.safetensors"))
            assert set(merged) == set(state) and all(torch.equal(merged[k], state[k]) for k in merged)


@ranks(2, timeout=120.0)
def test_two_models_with_three_optimizers_train_clip_and_resume(rank, world, tmp_path):
    from accelerate import Accelerator

    def run(folder):
        accelerator = Accelerator()
        first, second = tiny_llama(), tiny_llama(seed=3, hidden_size=16)
        halves = [p for n, p in first.named_parameters() if "layers.0" in n], [
            p for n, p in first.named_parameters() if "layers.0" not in n
        ]
        optimizers = [torch.optim.AdamW(half, lr=1e-2) for half in halves]
        optimizers += [torch.optim.SGD(second.parameters(), lr=1e-1, momentum=0.9)]
        first, *optimizers = accelerator.prepare(first, *optimizers)
        second = accelerator.prepare(second)
        out = []

        def steps(rows):
            for batch in rows.split(2 * world):
                mine = batch[2 * rank : 2 * rank + 2]
                loss = first(input_ids=mine, labels=mine).loss + second(input_ids=mine, labels=mine).loss
                accelerator.backward(loss)
                out.append(float(accelerator.clip_grad_norm_(halves[0], 0.1)))
                out.append(float(accelerator.clip_grad_norm_(second.parameters(), 0.5, norm_type=1)))
                accelerator.clip_grad_value_(halves[1], 1e-3)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                out.append(float(accelerator.gather(loss.detach()[None]).mean()))

        steps(token_rows(8))
        if folder is not None:
            accelerator.save_state(folder)
            steps(token_rows(8, seed=5))
            replay, out[6:] = out[6:], []
            accelerator.load_state(folder)
            steps(token_rows(8, seed=5))
            assert out[6:] == replay
        else:
            steps(token_rows(8, seed=5))
        return out

    with accelerate():
        theirs = run(None)
    with accelerate(shardkit=True):
        close(run(str(tmp_path / "state")), theirs)


@ranks(2, timeout=120.0)
def test_metrics_no_sync_free_memory_and_a_smaller_batch_after_running_out_of_memory(rank, world):
    from accelerate import Accelerator
    from accelerate.utils import find_executable_batch_size

    sizes = []
    with accelerate(shardkit=True):
        accelerator = Accelerator()

        @find_executable_batch_size(starting_batch_size=8)
        def train(batch_size):
            accelerator.free_memory()
            sizes.append(batch_size)
            model = tiny_llama()
            model, optimizer, loader = accelerator.prepare(
                model, torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(token_rows(30), batch_size=batch_size)
            )
            hook = model.model.layers[1].register_forward_hook(out_of_memory) if batch_size == 8 else None
            seen = []
            for batch in loader:
                with accelerator.no_sync(model):
                    accelerator.backward(model(input_ids=batch, labels=batch).loss / 2)
                loss = model(input_ids=batch, labels=batch).loss / 2
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                seen.append(accelerator.gather_for_metrics(batch))
            assert hook is None
            return torch.cat(seen)

        seen = train()
    assert sizes[0] == 8 and len(sizes) == 2
    assert len(seen) == 30, "samples that were added to even out the ranks were counted"


def out_of_memory(module, args, output):
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")


@ranks(2, timeout=120.0)
def test_generation_with_unequal_lengths_per_rank(rank, world):
    with accelerate():
        prompt = token_rows(1)[:, : 4 + 3 * rank]
        want = tiny_llama().eval().generate(prompt, max_new_tokens=3 + 4 * rank, do_sample=False)
    with accelerate(shardkit=True):
        accelerator, things, _ = loop(clip=0.0)
        from accelerate import Accelerator

        model = Accelerator().prepare(tiny_llama().eval())
        got = model.generate(prompt, max_new_tokens=3 + 4 * rank, do_sample=False)
    assert torch.equal(got, want)


@pytest.mark.skipif(older("transformers", "5.0"), reason="only the first rank reads the weights")
@ranks(2, timeout=120.0)
def test_a_loaded_model_is_read_from_its_file_only_where_this_ranks_piece_lies(rank, world, tmp_path):
    """Weights that from_pretrained has mapped from one file: pages of other ranks' pieces are never touched."""
    from accelerate import Accelerator
    from transformers import LlamaForCausalLM

    folder = str(tmp_path / "weights")
    if rank == 0:
        # Large, because the kernel maps up to 2 MB around what is touched.
        tiny_llama(hidden_size=256, vocab_size=65536, tie_word_embeddings=True).save_pretrained(folder)
    torch.distributed.barrier()
    with accelerate(shardkit=True, FSDP_CPU_RAM_EFFICIENT_LOADING="true"):
        accelerator = Accelerator()
        model = LlamaForCausalLM.from_pretrained(folder)
        held = [p.data for p in model.parameters()]  # keeps the mapping, so that it can be asked
        size = sum(t.nbytes for t in held)
        before = resident(folder)
        model = accelerator.prepare(model)
        touched = resident(folder) - before
        whole = accelerator.get_state_dict(model)
    assert 0.3 * size < touched < 0.75 * size, (touched, size)
    if rank == 0:
        want = LlamaForCausalLM.from_pretrained(folder).state_dict()
        assert all(torch.equal(whole[k], want[k]) for k in want)


def resident(folder):
    """Bytes of the files in `folder` that this process has in memory, by the kernel's account."""
    total, inside = 0, False
    for line in open("/proc/self/smaps"):
        if "-" in line.split(" ", 1)[0] and not line[0].isupper():
            inside = folder in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@ranks(2, timeout=120.0)
def test_a_head_that_the_file_lacks_comes_from_the_first_rank(rank, world, tmp_path):
    from accelerate import Accelerator
    from transformers import LlamaForCausalLM, LlamaForSequenceClassification

    folder = str(tmp_path / "weights")
    if rank == 0:
        tiny_llama().save_pretrained(folder)
    torch.distributed.barrier()
    with accelerate(shardkit=True, FSDP_CPU_RAM_EFFICIENT_LOADING="true"):
        accelerator = Accelerator()
        torch.manual_seed(rank)
        model = LlamaForSequenceClassification.from_pretrained(folder, num_labels=3)
        assert model.score.weight.is_meta == (rank > 0) or older("transformers", "5.0")
        head = model.score.weight.detach().clone()
        model = accelerator.prepare(model)
        whole = accelerator.get_state_dict(model)
        if rank == 0:
            assert torch.equal(whole["score.weight"], head)
            want = LlamaForCausalLM.from_pretrained(folder).model.state_dict()
            assert all(torch.equal(whole[f"model.{k}"], want[k]) for k in want)


@ranks(2, timeout=120.0)
@pytest.mark.parametrize("ram_efficient", ["true", "false"])
def test_models_that_ranks_seeded_differently_become_the_first_ranks(rank, world, ram_efficient):
    from accelerate import Accelerator

    with accelerate(shardkit=True, FSDP_CPU_RAM_EFFICIENT_LOADING=ram_efficient):
        accelerator = Accelerator()
        model = accelerator.prepare(tiny_llama(seed=rank))
        whole = accelerator.get_state_dict(model)
        if rank == 0:
            assert all(torch.equal(whole[k], v) for k, v in tiny_llama(seed=0).state_dict().items())


@ranks(2, timeout=120.0)
def test_torch_compile_before_or_by_prepare(rank, world):
    with accelerate():
        theirs = loop()[2]
    with accelerate(shardkit=True):
        close(loop(make=lambda: torch.compile(tiny_llama(), backend="eager"))[2], theirs)
    with accelerate(shardkit=True):
        close(loop(dynamo_backend="eager")[2], theirs)


@ranks(2, timeout=120.0)
@pytest.mark.parametrize("strategy", ["full", "none"])
def test_an_optimizer_that_looks_at_whole_matrices_is_refused_where_there_are_pieces(rank, world, strategy):
    from accelerate import Accelerator

    from shardkit.accelerate import ShardkitPlugin

    with accelerate(shardkit=True):
        accelerator = Accelerator(fsdp_plugin=ShardkitPlugin(sharding_strategy=strategy))
        model = tiny_llama()
        optimizer = accelerator.prepare(torch.optim.Adafactor(model.parameters()))
        if strategy == "none":
            accelerator.prepare(model)
        else:
            with pytest.raises(ValueError, match="Adafactor looks at whole matrices"):
                accelerator.prepare(model)
        assert optimizer is not None


@ranks(2, timeout=120.0)
def test_what_cannot_work_is_refused_in_words(rank, world, tmp_path):
    from accelerate import Accelerator

    from shardkit.accelerate import ShardkitPlugin

    with accelerate(shardkit=True):
        with pytest.raises(ValueError, match="no option shard_strategy"):
            ShardkitPlugin(shard_strategy="zero1")
        with pytest.raises(ValueError, match="LOCAL_STATE_DICT"):
            ShardkitPlugin(state_dict_type="LOCAL_STATE_DICT")
        accelerator = Accelerator(fsdp_plugin=ShardkitPlugin(transformer_cls_names_to_wrap=["LamaDecoderLayer"]))
        with pytest.raises(ValueError, match="LamaDecoderLayer.*LlamaDecoderLayer"):
            accelerator.prepare(tiny_llama())
    with accelerate(shardkit=True):
        accelerator, things, _ = loop()
        with pytest.raises(RuntimeError, match="has none of pytorch_model_fsdp_0, pytorch_model_fsdp.bin"):
            tmp_path.joinpath("empty").mkdir(exist_ok=True)
            accelerator.load_state(str(tmp_path / "empty"))
