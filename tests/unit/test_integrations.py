"""The interfaces of other libraries on paper: names, signatures, policies, and what importing them costs."""

import copy
import functools
import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn

from shardkit.errors import ConfigError
from shardkit.integrations import fairscale, torch_config, torch_fsdp, torch_wrap
from shardkit.integrations._common import selected_by
from shardkit.wrap import find_units

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("module", ["fairscale", "torch_fsdp"])
def test_importing_an_integration_imports_neither_library(module):
    code = f"import sys, shardkit.integrations.{module}; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    names = ran.stdout.split()
    assert not [name for name in names if name.startswith(("torch.distributed.fsdp", "fairscale"))]


def parameters(function):
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()][1:]


def test_fsdp1s_constructor_has_every_argument_in_its_place():
    from torch.distributed.fsdp import FullyShardedDataParallel

    theirs = parameters(FullyShardedDataParallel.__init__)
    ours = parameters(torch_fsdp.FullyShardedDataParallel.__new__)
    assert [name for name, _ in theirs] == [name for name, _ in ours]
    for (name, want), (_, got) in zip(theirs[1:], ours[1:], strict=True):
        assert got == want or getattr(got, "name", 0) == getattr(want, "name", 1), name


def test_fsdp1s_public_methods_and_names_are_there():
    from torch.distributed import fsdp

    own = vars(fsdp.FullyShardedDataParallel)
    methods = [name for name in own if not name.startswith("_") and name not in ("module", "forward")]
    missing = [name for name in methods if not callable(getattr(torch_fsdp.FullyShardedDataParallel, name, None))]
    assert not missing
    for name in methods:
        theirs = list(inspect.signature(getattr(fsdp.FullyShardedDataParallel, name)).parameters)
        if name not in ("named_buffers", "named_parameters", "apply", "clip_grad_norm_", "no_sync"):  # not ours
            ours = getattr(torch_fsdp.FullyShardedDataParallel, name)
            assert list(inspect.signature(ours).parameters) == theirs, name
    not_needed = {"FlatParameter", "CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy"}  # taken as they are
    not_needed |= {"DataParallelMeshDims", "share_comm_ctx"}
    assert set(fsdp.__all__) - not_needed <= set(torch_fsdp.__all__)


def test_fsdp1s_settings_have_the_same_fields_and_defaults():
    from torch.distributed import fsdp

    for name in torch_config.__dict__:
        theirs, ours = getattr(fsdp, name, None), getattr(torch_config, name)
        if isinstance(theirs, type) and hasattr(theirs, "__dataclass_fields__"):
            fields = {f: theirs.__dataclass_fields__[f].default for f in theirs.__dataclass_fields__}
            assert {f: ours.__dataclass_fields__[f].default for f in ours.__dataclass_fields__} == fields, name
        elif isinstance(theirs, type) and hasattr(theirs, "__members__"):
            assert list(theirs.__members__) == list(ours.__members__), name


def test_fairscales_constructors_have_every_argument_in_its_place():
    pytest.importorskip("fairscale")
    from fairscale.nn import FullyShardedDataParallel
    from fairscale.nn.checkpoint import checkpoint_wrapper
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.nn.wrap import auto_wrap, config_auto_wrap_policy, default_auto_wrap_policy, enable_wrap, wrap
    from fairscale.optim import OSS
    from fairscale.optim.grad_scaler import ShardedGradScaler

    for theirs, ours in (
        (FullyShardedDataParallel.__init__, fairscale.FullyShardedDataParallel.__new__),
        (ShardedDataParallel.__init__, fairscale.ShardedDataParallel.__new__),
        (OSS.__init__, fairscale.OSS.__init__),
        (ShardedGradScaler.__init__, fairscale.ShardedGradScaler.__init__),
        (checkpoint_wrapper, fairscale.checkpoint_wrapper),
        (default_auto_wrap_policy, fairscale.default_auto_wrap_policy),
        (config_auto_wrap_policy, fairscale.config_auto_wrap_policy),
        (auto_wrap, fairscale.auto_wrap),
        (enable_wrap, fairscale.enable_wrap),
        (wrap, fairscale.wrap),
    ):
        want, got = parameters(theirs), parameters(ours)
        assert [name for name, _ in got] == [name for name, _ in want], ours
        defaults = [(a, b) for (n, a), (_, b) in zip(want, got, strict=True) if n not in ("process_group", "module")]
        assert all(a == b or b is None for a, b in defaults), (ours, defaults)
    for cls, ours in ((FullyShardedDataParallel, fairscale.FullyShardedDataParallel), (OSS, fairscale.OSS)):
        names = [name for name in vars(cls) if not name.startswith("_") and callable(getattr(cls, name))]
        skipped = {"forward", "non_shared_params"}  # the second is the bookkeeping of append_shared_param
        assert not [n for n in names if n not in skipped and not hasattr(ours, n)]
    listed = "no_sync reduce refresh_trainable sync_buffers zero_grad state_dict load_state_dict".split()
    assert all(callable(getattr(fairscale.ShardedDataParallel, name)) for name in listed)


class Structured(nn.Module):
    """Takes keyword arguments, returns tensors in a dictionary and a nested list, draws random numbers, counts."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x, *, scale):
        h = self.dropout(self.norm(self.linear(x))) * scale
        return {"h": h, "more": [[h + x], 3]}


class Plain(Structured):
    """As fairscale can do it: a tensor comes out."""

    def forward(self, x, *, scale):
        return super().forward(x, scale=scale)["h"]


def trained(module, wrapper=lambda m: m):
    """Everything that a wrapped module does, after two backwards: outputs, gradients, buffers."""
    module = wrapper(module)
    torch.manual_seed(3)
    for _ in range(2):
        x = torch.ones(3, 4).cumsum(0).requires_grad_()
        out = module(x, scale=torch.tensor(2.0, requires_grad=True))
        tensors = [out] if isinstance(out, torch.Tensor) else [out["h"], out["more"][0][0]]
        sum((t**2).sum() for t in tensors).backward()
    found = {n.rpartition("_fsdp_wrapped_module.")[2]: p.grad for n, p in module.named_parameters()}
    return {**found, **dict(module.named_buffers()), "x": x.grad, "out": tensors[-1].detach()}


def build(cls):
    torch.manual_seed(0)
    return cls()


@pytest.mark.parametrize("offload", [False, True])
def test_checkpoint_wrapper_equals_fairscales_where_that_is_right(offload):
    theirs = pytest.importorskip("fairscale.nn.checkpoint").checkpoint_wrapper
    want = trained(build(Plain), lambda m: theirs(m, offload))
    got = trained(build(Plain), lambda m: fairscale.checkpoint_wrapper(m, offload))
    assert want.keys() == got.keys()
    for name in set(want) - {"norm.num_batches_tracked"}:
        torch.testing.assert_close(got[name], want[name], msg=name)


def test_checkpoint_wrapper_is_right_where_fairscales_is_not():
    """There: dictionaries come out as their keys, tensors in nested lists lose their gradient, a normalisation that is
    wrapped counts twice, copies run the original's weights, and pickling fails."""
    want, got = trained(build(Structured)), trained(build(Structured), fairscale.checkpoint_wrapper)
    for name in want:
        torch.testing.assert_close(got[name], want[name], msg=name)
    norm = fairscale.checkpoint_wrapper(nn.BatchNorm1d(4))
    norm(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert norm.num_batches_tracked == 1
    original = fairscale.checkpoint_wrapper(nn.Linear(2, 2))
    twin, thawed = copy.deepcopy(original), pickle.loads(pickle.dumps(original))
    with torch.no_grad():
        original.weight.zero_()
    x = torch.ones(1, 2, requires_grad=True)
    assert not torch.equal(twin(x), original(x)) and torch.equal(twin(x), thawed(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.b(self.a(x))


def model():
    return nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(2)), "head": nn.Linear(2, 2)})


def test_recursive_policies_take_what_their_own_libraries_take():
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    for size in (1, 10, 20, 25, 40, 60, 1000):
        for options in ({}, {"force_leaf_modules": {Block}}, {"exclude_wrap_modules": {nn.Linear, nn.ModuleDict}}):
            tree = model()
            names = {m: name for name, m in tree.named_modules()}
            theirs = functools.partial(size_based_auto_wrap_policy, min_num_params=size, **options)
            ours = functools.partial(torch_wrap.size_based_auto_wrap_policy, min_num_params=size, **options)
            old = functools.partial(fairscale.default_auto_wrap_policy, min_num_params=size, **options)
            taken = [names[m] for m in selected_by(ours, tree, (), root_flag=False)]
            assert taken == [names[m] for m in selected_by(theirs, tree, (), root_flag=False)]
            assert taken == [names[m] for m in selected_by(old, tree, (), root_flag=True)]


def test_a_custom_policy_may_return_dictionaries_and_nothing_else():
    tree = model()
    units = torch_wrap.units_of_policy
    policy, apart = units(tree, torch_wrap.CustomPolicy(lambda m: {} if isinstance(m, Block) else False), (), ())
    assert [name for name, _ in find_units(tree, policy)] == ["blocks.0", "blocks.1"] and not apart
    chosen = torch_wrap.CustomPolicy(lambda m: {"x": 1} if m is tree["head"] else isinstance(m, Block))
    policy, apart = units(tree, chosen, [tree["blocks"][0]], ())
    assert policy is None and apart == [(tree["blocks"][1], {}), (tree["head"], {"x": 1})]
    with pytest.raises(ConfigError, match="returned 'yes'"):
        units(tree, torch_wrap.CustomPolicy(lambda m: "yes"), (), ())
    assert units(tree, None, (), ()) == (None, [])


def test_state_dict_settings_are_completed_and_checked():
    chosen = torch_config.settings("SHARDED_STATE_DICT")
    assert type(chosen.state_dict_config) is torch_config.ShardedStateDictConfig
    assert chosen.optim_state_dict_config.offload_to_cpu is True
    with pytest.raises(ConfigError):
        torch_config.settings("SOME_STATE_DICT")
    with pytest.raises(ConfigError, match="takes a FullStateDictConfig, got a LocalStateDictConfig"):
        torch_config.settings("FULL_STATE_DICT", torch_config.LocalStateDictConfig())


def test_a_mixed_precision_of_shardkits_is_refused_with_a_hint():
    import shardkit

    arguments = {n: d for n, d in parameters(torch_fsdp.FullyShardedDataParallel.__new__) if n != "module"}
    arguments["mixed_precision"] = shardkit.MixedPrecision()
    with pytest.raises(ConfigError, match="integrations.torch_fsdp"):
        torch_config.translate(model(), arguments)
