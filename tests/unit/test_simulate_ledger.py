"""The ledger, the allocator's rules and the search, without a process group."""

import dataclasses
import gc

import pytest
import torch

from shardkit.errors import ConfigError
from shardkit.simulate import devices, kernels, models, plots
from shardkit.simulate.allocator import CachingAllocator, reserved_bytes
from shardkit.simulate.choice import ONE, Choice
from shardkit.simulate.ledger import ACTIVATIONS, GRADIENTS, TEMPORARIES, Ledger
from shardkit.simulate.observe import Watch
from shardkit.simulate.report import Report, compare, make, size
from shardkit.simulate.speed import Traffic, seconds

MB = 1 << 20


def watched():
    ledger = Ledger()
    return ledger, Watch(ledger)


def test_memory_counts_from_the_operator_that_made_it_until_its_last_reference():
    ledger, watch = watched()
    with watch:
        a = torch.zeros(1000)
        assert ledger.total == 4000
        view = a[10:20]
        del a
        gc.collect()
        assert ledger.total == 4000, "a view keeps the whole storage"
        del view
        gc.collect()
        assert ledger.total == 0


def test_a_storage_is_counted_once_however_many_tensors_lie_on_it():
    ledger, watch = watched()
    with watch:
        a = torch.zeros(1000)
        views = [a.view(10, 100), a[5:], a.as_strided((3,), (1,))]
        assert ledger.total == 4000 and len(ledger.blocks) == 1
        del views


def test_what_a_forward_leaves_behind_is_an_activation_and_what_it_drops_a_temporary():
    ledger, watch = watched()
    with watch:
        with ledger.phase("forward"):
            kept = torch.zeros(10)
            dropped = torch.zeros(20)
            del dropped
    ledger.close()
    assert sorted((b.size, b.labels[-1][1]) for b in ledger.blocks) == [(40, ACTIVATIONS), (80, TEMPORARIES)]
    del kept


def test_a_breakdown_tells_what_memory_was_for_at_that_moment():
    ledger, watch = watched()
    with watch:
        a = torch.zeros(100)
        before = ledger.now
        ledger.label([a], GRADIENTS, since_birth=False)
        torch.zeros(1)
    assert ledger.breakdown(before) == {("", TEMPORARIES): 400}
    assert ledger.breakdown(ledger.now)["", GRADIENTS] == 400


def test_the_peak_of_a_phase_is_the_most_that_was_alive_in_it():
    ledger, watch = watched()
    with watch:
        with ledger.phase("forward"):
            a = torch.zeros(100)
            b = torch.zeros(300)
            del b
            c = torch.zeros(200)
        with ledger.phase("backward"):
            del a
    ledger.close()
    report = make(ledger, "measured", {})
    assert report.phases["forward"].total == 1600
    assert report.phases["backward"].total == 1200
    assert report.peak == 1600 and report.peak_phase == "forward"
    assert max(sum(row["bytes"].values()) for row in report.timeline) == 1600
    del c


def test_memory_on_the_host_does_not_count():
    ledger, watch = watched()
    with watch:
        ledger.see_on_host(torch.zeros(100))
        a = torch.zeros(50)
        ledger.host_labels = (GRADIENTS,)
        ledger.total = 200
        ledger.label([a], GRADIENTS, since_birth=False)
        assert ledger.total == 0


def test_a_peak_inside_an_operator_counts_as_temporary():
    ledger, watch = watched()
    watch.workspace = lambda func, args: 1000 if func is torch.ops.aten.mm.default else 0
    with watch, ledger.phase("forward"):
        out = torch.zeros(4, 4) @ torch.zeros(4, 4)
    ledger.close()
    peak = make(ledger, "predicted", {}).phases["forward"]
    assert peak.total == 3 * 64 + 1000 and peak.categories[TEMPORARIES] >= 1000
    del out


@pytest.mark.parametrize(("x", "w", "expected"), [
    ((8, 64, 16, 16), (64, 64, 3, 3), 671744),  # copies of input and weight, as the profiler records them
    ((8, 256, 4, 4), (512, 256, 3, 3), 4849664),
    ((8, 3, 64, 64), (32, 3, 7, 7), 1048576),  # three channels are not copied: the result beside its copy
])  # fmt: skip
def test_a_convolutions_copies_are_known_by_shape(x, w, expected):
    stride, padding = (2, w[2] // 2) if x[1] != 64 else (1, 1)
    args = (torch.empty(x), torch.empty(w), None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1)
    assert kernels.workspace(torch.ops.aten.convolution.default, args) == expected


def test_a_report_survives_json(tmp_path):
    ledger, watch = watched()
    with watch, ledger.phase("forward"):
        a = torch.zeros(100)
    ledger.close()
    report = make(ledger, "measured", {"model": "M", "world_size": 2}, {"seconds": 1.0})
    report.save(tmp_path / "r.json")
    assert Report.load(tmp_path / "r.json") == report
    assert "+0.00 %" in compare(report, report)
    with pytest.raises(ValueError, match="version"):
        Report.from_dict({"version": 99})
    del a


def test_a_page_holds_its_pictures_and_links_to_nothing(tmp_path):
    pytest.importorskip("matplotlib")
    ledger, watch = watched()
    with watch, ledger.phase("forward"):
        a = torch.zeros(1000)
    ledger.close()
    report = make(ledger, "predicted", {"model": "<M>", "world_size": 2})
    report.save(tmp_path / "r.html")
    report.save(tmp_path / "r.png")
    page = (tmp_path / "r.html").read_text()
    assert "data:image/png;base64," in page and "http" not in page and "&lt;M&gt;" in page
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ConfigError, match="json, .png or .html"):
        plots.save([report], tmp_path / "r.pdf")
    del a


@pytest.mark.parametrize(("sizes", "reserved"), [
    ([1], 2 * MB),  # small blocks share segments of 2 MiB
    ([MB, MB], 2 * MB),
    ([MB, MB, 1], 4 * MB),
    ([MB + 1], 20 * MB),  # middling ones share segments of 20 MiB
    ([9 * MB, 9 * MB], 20 * MB),
    ([10 * MB], 10 * MB),  # large ones have their own, in steps of 2 MiB
    ([11 * MB], 12 * MB),
])  # fmt: skip
def test_the_allocator_reserves_segments_by_torchs_rules(sizes, reserved):
    allocator = CachingAllocator()
    for n in sizes:
        allocator.allocate(n)
    assert allocator.reserved == reserved


def test_the_allocator_merges_what_was_freed_and_uses_it_again():
    allocator = CachingAllocator()
    pieces = [allocator.allocate(5 * MB) for _ in range(4)]
    assert allocator.reserved == 20 * MB
    for piece in pieces:
        allocator.free(piece)
    allocator.allocate(9 * MB)
    allocator.allocate(9 * MB)
    assert allocator.reserved == 20 * MB and allocator.allocated == 18 * MB


def test_reserved_bytes_are_at_least_the_live_ones():
    ledger, watch = watched()
    with watch, ledger.phase("forward"):
        kept = [torch.zeros(n * 1000) for n in (1, 500, 3000)]
    ledger.close()
    assert reserved_bytes(ledger) >= ledger.total
    del kept


@pytest.mark.parametrize(("model", "message"), [
    ("lama-7b", "Did you mean llama-7b"),
    ("no_such_module:build", "cannot be imported"),
    ("math:nothing", "has no 'nothing'"),
    ("math:pi", "expected a function"),
    ("/nowhere/config.json", "does not exist"),
    ("LammaConfig", "LlamaConfig"),
    (torch.nn.Linear(1, 1), "Pass a function that builds it"),
    (3, "cannot make a model of a int"),
])  # fmt: skip
def test_what_is_no_model_gets_a_sentence_that_says_what_to_do(model, message):
    if model == "LammaConfig":
        pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=message):
        models.source(model)


def test_a_configuration_file_that_is_none_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="model_type"):
        models.source(tmp_path)


def test_gpus_have_names_and_any_amount_of_memory():
    assert devices.device("h100-80g").memory == 80 << 30
    assert devices.device("h100-64g").memory == 64 << 30
    with pytest.raises(ConfigError, match="Did you mean h100-80g"):
        devices.device("h100-80")


def test_a_choice_that_shards_and_recomputes_more_needs_no_more_memory():
    full, none = Choice("full", 1.0), Choice("none")
    assert full.needs_no_more_than(none) and not none.needs_no_more_than(full)
    assert not Choice("full").needs_no_more_than(Choice("none", 1.0)), "activations may outweigh what sharding saves"
    there = Choice("full", 1.0, offload_activations=True)
    assert there.needs_no_more_than(full) and not full.needs_no_more_than(there)
    assert not full.needs_no_more_than(Choice("none", units=ONE)), "other units, other peaks"


def test_predicted_time_grows_with_bytes_recomputation_and_slower_links():
    h100, t4 = devices.device("h100-80g"), devices.device("t4-16g")
    little, much = Traffic(8, 1, 1e9, 0, 10), Traffic(8, 1, 1e12, 0, 10)
    assert seconds(little, 1e12, 0, True, h100).total < seconds(much, 1e12, 0, True, h100).total
    assert seconds(little, 1e15, 0, True, h100).total < seconds(little, 1e15, 1, True, h100).total
    assert seconds(much, 1e12, 0, True, h100).total < seconds(much, 1e12, 0, True, t4).total


def test_predicted_time_counts_activations_on_the_link_small_messages_and_a_unit_that_is_everything():
    h100 = devices.device("h100-80g")

    def took(**changes):
        sent = dataclasses.replace(Traffic(8, 1, 1e12, 0, 10), **changes)
        return seconds(sent, 1e15, 0, True, h100).total

    assert took(activations=50e9) == pytest.approx(took() + 0.1 * 1.0), "hidden but for a tenth: 50 GB at 50 GB/s"
    assert took(activations=5e12) == pytest.approx(100 + 0.1 * took()), "the link is what takes the time"
    assert took(collectives=1000) > took(collectives=10)
    parts = seconds(Traffic(8, 1, 1e12, 0, 0, exposed=1.0), 1e15, 0, True, h100)
    assert parts.total == pytest.approx(parts.arithmetic + parts.messages), "one unit: nothing to hide behind"


def test_sizes_are_written_for_people():
    assert [size(n) for n in (0, 12, 1500, 25_300_000, 123e9, 2e12)] == [
        "0",
        "12 B",
        "1.5 kB",
        "25.3 MB",
        "123 GB",
        "2 TB",
    ]
