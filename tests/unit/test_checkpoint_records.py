"""Records: what torch.load reads, read back in any part; boxes of any shape; a plan of safetensors files."""

import io
import random

import pytest
import torch

from shardkit.checkpoint import files, records, safetensors, save
from shardkit.checkpoint.saved import Record, SavedTensor
from shardkit.errors import CheckpointError

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16,
]  # fmt: skip


def some(dtype, shape):
    generator = torch.Generator().manual_seed(1)
    return (torch.rand(shape, generator=generator) * 9).to(dtype)


def same(got, want):
    as_bytes = (records.memory_of(t.contiguous()).tobytes() for t in (got, want))
    return got.shape == want.shape and got.dtype == want.dtype and len(set(as_bytes)) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (2, 3, 4)], ids=str)
def test_torch_load_reads_a_record(dtype, shape, tmp_path):
    tensor = some(dtype, shape)
    with open(tmp_path / "x", "wb") as file:
        file.write(b"before")
        length, extent = records.write_tensor(file, tensor, shape)
    data = (tmp_path / "x").read_bytes()
    assert len(data) == 6 + length
    assert same(torch.load(io.BytesIO(data[6:]), weights_only=True), tensor)
    with records.Reader(tmp_path) as reader:
        parsed = reader.parse("x", 6, length)
    assert (parsed.offset, parsed.nbytes, parsed.dtype) == (extent.offset, extent.nbytes, dtype)
    assert (parsed.sizes, parsed.strides) == (extent.sizes, extent.strides)
    assert parsed.offset % 64 == 6  # aligned within the record, as torch.save aligns


@pytest.mark.parametrize("tensor", [
    torch.arange(24.0).view(4, 6).t(), torch.arange(10)[3:7], torch.nn.Parameter(torch.ones(3, 3)),
    torch.arange(120.0).view(1, 2, 5, 12).to(memory_format=torch.channels_last),
], ids=["transposed", "slice", "parameter", "channels_last"])  # fmt: skip
def test_what_torch_save_wrote_is_read_whatever_its_strides(tensor, tmp_path):
    with open(tmp_path / "x", "wb") as file:
        file.write(b"abc")
        torch.save(tensor, file)
    length = (tmp_path / "x").stat().st_size - 3
    shape = tuple(tensor.shape)
    saved = SavedTensor("t", shape, tensor.dtype, [Record(tuple(0 for _ in shape), shape, "x", 3, length)])
    with records.Reader(tmp_path) as reader:
        assert same(saved.read(reader), tensor.detach().contiguous())
        flat = tensor.detach().contiguous().view(-1)
        out = torch.empty(3, dtype=torch.float64)
        saved.read_run(reader, 1, 4, out)
        assert torch.equal(out, flat[1:4].double())


def test_any_run_is_read_from_any_boxes(tmp_path):
    """Boxes as column-sharded and row-sharded ranks save them, cut at random; runs at random; three dtypes."""
    choose = random.Random(3)
    whole = torch.arange(6 * 7 * 5, dtype=torch.float32).view(6, 7, 5)
    for trial in range(40):
        cuts = [sorted({0, n, *(choose.randrange(n + 1) for _ in range(choose.randrange(3)))}) for n in whole.shape]
        boxes = [
            ((a, b, c), (a2 - a, b2 - b, c2 - c))
            for a, a2 in zip(cuts[0], cuts[0][1:])
            for b, b2 in zip(cuts[1], cuts[1][1:])
            for c, c2 in zip(cuts[2], cuts[2][1:])
        ]
        found = []
        with open(tmp_path / f"{trial}", "wb") as file:
            for (a, b, c), sizes in boxes:
                part = whole[a : a + sizes[0], b : b + sizes[1], c : c + sizes[2]].contiguous()
                start = file.tell()
                length, extent = records.write_tensor(file, part, sizes)
                known = records.dataclasses.replace(extent, file=f"{trial}") if trial % 2 else None
                found.append(Record((a, b, c), sizes, f"{trial}", start, length, known))
        saved = SavedTensor("t", tuple(whole.shape), whole.dtype, found)
        start = choose.randrange(whole.numel())
        stop = choose.randrange(start, whole.numel() + 1)
        out = torch.empty(stop - start, dtype=choose.choice([torch.float32, torch.float64, torch.int64]))
        with records.Reader(tmp_path) as reader:
            saved.read_run(reader, start, stop, out)
            assert torch.equal(out, whole.view(-1)[start:stop].to(out.dtype))
            if stop > start:
                saved.records.clear()
                with pytest.raises(CheckpointError, match="not complete"):
                    saved.read_run(reader, start, stop, out)


def test_a_damaged_block_is_found_by_whoever_reads_a_part_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "BLOCK", 64)
    tensor = torch.arange(100.0)
    with open(tmp_path / "x", "wb") as file:
        _, extent = records.write_tensor(file, tensor, (100,))
    extent = records.dataclasses.replace(extent, file="x")
    data = bytearray((tmp_path / "x").read_bytes())
    data[extent.offset + 200] ^= 1  # element 50, in the block of elements 48 to 63
    (tmp_path / "x").write_bytes(data)
    saved = SavedTensor("t", (100,), tensor.dtype, [Record((0,), (100,), "x", 0, 0, extent)])
    with records.Reader(tmp_path) as reader:
        for start, stop, good in ((0, 48, True), (64, 100, True), (10, 49, False), (60, 61, False), (0, 100, False)):
            out = torch.empty(stop - start)
            if good:
                saved.read_run(reader, start, stop, out)
                assert torch.equal(out, tensor[start:stop])
            else:
                with pytest.raises(CheckpointError, match="x is damaged: bytes .* checksum differs"):
                    saved.read_run(reader, start, stop, out)


def test_pickles_that_could_run_code_are_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return print, ("ran",)

    with open(tmp_path / "x", "wb") as file:
        torch.save(Evil(), file)
    with records.Reader(tmp_path) as reader, pytest.raises(CheckpointError, match="refers to"):
        reader.parse("x", 0, (tmp_path / "x").stat().st_size)


def test_records_stay_below_their_limit(monkeypatch):
    monkeypatch.setattr(records, "LARGEST", 40)
    boxes = list(save.small_enough(((2, 0), (3, 17)), 4))
    assert all(a * b * 4 <= 40 for _, (a, b) in boxes)
    cells = [(i + r, j + c) for (i, j), (a, b) in boxes for r in range(a) for c in range(b)]
    assert cells == [(i, j) for i in range(2, 5) for j in range(17)]  # in order, each once


def test_a_plan_of_safetensors_files_is_what_the_library_reads(tmp_path):
    from safetensors import safe_open

    tensors = {"b": some(torch.bool, (3,)), "f": some(torch.float32, (2, 2)), "h": some(torch.bfloat16, (5,))}
    places = [safetensors.Place(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    layout = safetensors.plan(places)
    data = bytearray(layout.lengths["model.safetensors"])
    data[: len(layout.headers["model.safetensors"])] = layout.headers["model.safetensors"]
    for p in places:
        assert p.offset % p.dtype.itemsize == 0
        data[p.offset : p.offset + p.nbytes] = records.memory_of(tensors[p.name])
    (tmp_path / "model.safetensors").write_bytes(data)
    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        assert all(same(opened.get_tensor(name), t) for name, t in tensors.items())
    many = safetensors.plan(places, file_bytes=12)
    assert sorted(many.headers) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    with pytest.raises(CheckpointError, match="no name for torch.complex128"):
        safetensors.plan([safetensors.Place("z", torch.complex128, (1,))])


def test_folders_swap_in_one_call(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not files.exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this system cannot exchange two folders; publish() renames twice")
    assert (tmp_path / "a" / "b").exists() and (tmp_path / "b" / "a").exists()
