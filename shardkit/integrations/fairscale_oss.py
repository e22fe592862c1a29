"""fairscale's OSS: an optimizer that keeps a share of its state on each rank.

Over the parameters of a `ShardedDataParallel`, or of anything that shardkit has sharded, it steps each rank's shards:
that is the `zero2` strategy. Over whole parameters, as DDP leaves them, each parameter belongs to one rank, which steps
it and sends the result to the others: ZeRO-1. Which it is shows at the first step, so the order of building the
optimizer and wrapping the model does not matter.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from ..checkpoint.optimizer import _piece, full_optim_state_dict, parameter_names
from ..comm import Group
from ..errors import StateError
from ..runtime.flat_param import home_of
from ._common import say


class OSS(torch.optim.Optimizer):
    """`OSS(params, optim=torch.optim.Adam, lr=0.01)`: an `optim` whose state is split over the ranks of `group`.

    Args:
        params: as for any optimizer; every rank the same.
        optim: the optimizer's class. Over whole parameters any; over shards, elementwise ones.
        group: None: all ranks.
        broadcast_buffer_size, broadcast_fp16, force_broadcast_object: have no effect.
        **default: arguments of `optim`.
    """

    def __init__(
        self,
        params: Any,
        optim: type[torch.optim.Optimizer] = torch.optim.SGD,
        group: Any = None,
        broadcast_buffer_size: int = -1,
        broadcast_fp16: bool = False,
        force_broadcast_object: bool = False,
        **default: Any,
    ):
        if broadcast_fp16:
            say("broadcast_fp16 has no effect: it would leave each rank with other weights than the owner's.")
        self.group = group if group is not None else dist.group.WORLD
        self._ranks = Group(self.group)
        self.world_size, self.rank = self._ranks.size, self._ranks.rank
        self._class, self._default = optim, default
        self._inner: torch.optim.Optimizer | None = None
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._owner: dict[nn.Parameter, int] = {}
        self._loads = [0] * self.world_size
        self._consolidated: dict[str, Any] | None = None
        self._waiting: dict[str, Any] | None = None  # a state that was loaded before the first step
        defaults = optim([nn.Parameter(torch.empty(0))], **default).defaults  # with those that were not given
        super().__init__(params, defaults)

    # ------------------------------------------------------------------------------------------------- partition

    def add_param_group(self, param_group: dict) -> None:
        """As for any optimizer. Over whole parameters, each goes to the rank with the least so far."""
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        for p in added["params"]:
            self._owner[p] = self._loads.index(min(self._loads))
            self._loads[self._owner[p]] += p.numel()
        if self._inner is not None:
            self._inner.add_param_group({**added, "params": self._mine(added["params"])})

    def partition_parameters(self) -> list[list[dict]]:
        """For each rank, the groups with the parameters that it steps. Over shards, that is a part of every one."""
        if self._is_sharded:
            return [[dict(g) for g in self.param_groups] for _ in range(self.world_size)]
        return [
            [{**g, "params": [p for p in g["params"] if self._owner[p] == rank]} for g in self.param_groups]
            for rank in range(self.world_size)
        ]

    def refresh_trainable(self) -> None:
        """Has no effect: frozen parameters belong to a rank as others do, and get no gradient."""

    @property
    def _is_sharded(self) -> bool:
        return any(home_of(p) is not None for g in self.param_groups for p in g["params"])

    def _mine(self, params: list[nn.Parameter]) -> list[nn.Parameter]:
        return params if self._is_sharded else [p for p in params if self._owner[p] == self.rank]

    @property
    def optim(self) -> torch.optim.Optimizer:
        """The optimizer that steps this rank's part."""
        if self._inner is None:
            groups = [{**g, "params": self._mine(g["params"])} for g in self.param_groups]
            self._inner = self._class(groups, **self._default)
            self.state = self._inner.state
            waiting, self._waiting = self._waiting, None
            if waiting is not None:
                self._load(waiting)
        return self._inner

    def _attach(self, model: nn.Module) -> None:
        """`model`, whose parameters these are, has been sharded."""
        self._model = weakref.ref(model)

    def _release(self) -> None:
        """`model` is about to be sharded: what steps whole parameters makes way. Collective if it has stepped."""
        has_state = self._inner is not None and any(self._ranks.all_gather_object(bool(self._inner.state)))
        if has_state:
            self._waiting = self.state_dict(all_ranks=True)
        self._inner = self._consolidated = None

    # ------------------------------------------------------------------------------------------------------ step

    @torch.no_grad()
    def step(self, closure: Callable | None = None, **kwargs: Any) -> Any:
        """One step, after which every rank computes with the new weights. Collective."""
        inner = self.optim
        _copy_options(self.param_groups, inner.param_groups)
        self._consolidated = None
        if closure is not None:
            loss = inner.step(torch.enable_grad()(closure), **kwargs)
        else:
            loss = inner.step(**kwargs)
        _copy_options(inner.param_groups, self.param_groups)
        if not self._is_sharded:
            self._send_updated()
        model = self._model()
        if model is not None:
            model._refresh_weights()  # type: ignore[operator]
        return loss

    def _send_updated(self) -> None:
        """Every rank's parameters to all others: one broadcast for each rank and dtype."""
        sent = []
        for rank in range(self.world_size):
            by_kind: dict[Any, list[nn.Parameter]] = {}
            for p, owner in self._owner.items():
                if owner == rank and p.requires_grad and p.numel():
                    by_kind.setdefault((p.dtype, p.device), []).append(p)
            for params in by_kind.values():
                flat = torch.cat([p.data.reshape(-1) for p in params])
                sent.append((self._ranks.broadcast(flat, rank), flat, params, rank))
        for work, flat, params, rank in sent:
            work.wait()
            if rank != self.rank:
                for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
                    p.copy_(part.view(p.shape))

    def clip_grad_norm(
        self, max_norm: float, norm_type: float = 2.0, filter_params_fn: Callable | None = None
    ) -> torch.Tensor:
        """Scales gradients so that their global norm is at most `max_norm`; returns the norm before.

        Over shards one all-reduce; whole gradients, which DDP has averaged already, are looked at as they are.
        """
        params = [p for g in self.param_groups for p in g["params"]]
        if filter_params_fn is not None:
            params = list(filter_params_fn(params))
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    # ----------------------------------------------------------------------------------------------------- state

    def consolidate_state_dict(self, recipient_rank: int = 0) -> None:
        """Collects the whole state on a rank of the group (-1: on all), in host memory, for `state_dict`. Collective.

        It is let go of at the next step.
        """
        wanted = recipient_rank in (self.rank, -1)
        number = {p: i for i, p in enumerate(p for g in self.param_groups for p in g["params"])}
        state: dict[int, Any] = {}
        if self._is_sharded:
            model = self._model()
            if model is None:
                raise StateError(
                    "the model is no ShardedDataParallel. Use shardkit.full_optim_state_dict(model, optim.optim)."
                )
            whole = full_optim_state_dict(model, self.optim, rank0_only=recipient_rank == 0, cpu=True)
            index = {name: number[p] for p, name in parameter_names(model).items() if p in number}
            state = {index[name]: values for name, values in whole.get("state", {}).items()} if wanted else {}
        else:
            mine = {number[p]: _on_host(values) for p, values in self.optim.state.items()}
            gather = self._ranks.gather_object if recipient_rank == 0 else self._ranks.all_gather_object
            for part in gather(mine):
                state.update(part)
        groups, at = [], 0
        for g in self.param_groups:
            groups.append({**copy.deepcopy({k: v for k, v in g.items() if k != "params"})})
            groups[-1]["params"] = list(range(at, at + len(g["params"])))
            at += len(g["params"])
        self._consolidated = {"state": dict(sorted(state.items())), "param_groups": groups} if wanted else None

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """The whole state as `optim` over all parameters would have it, where `consolidate_state_dict` put it.

        all_ranks: collect it on every rank now; collective. Raises RuntimeError where it was not collected.
        """
        if all_ranks:
            self.consolidate_state_dict(recipient_rank=-1)
        if self._consolidated is None:
            raise RuntimeError(
                "the optimizer's state was not collected on this rank since the last step. Call "
                "consolidate_state_dict(recipient_rank) on all ranks first."
            )
        return self._consolidated

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a whole state, given on every rank. It is not changed. No communication."""
        for current, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            current.update({k: v for k, v in saved.items() if k != "params"})
        if self._inner is None:
            self._waiting = state_dict
        else:
            self._load(state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        numbers = [n for g in state_dict["param_groups"] for n in g["params"]]
        of = dict(zip((p for g in self.param_groups for p in g["params"]), numbers, strict=True))
        local: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        at = 0
        for group, mine in zip(state_dict["param_groups"], self.optim.param_groups, strict=True):
            for i, p in enumerate(mine["params"], at):
                if of[p] in state_dict["state"]:
                    local[i] = {k: _cut(k, v, p) for k, v in state_dict["state"][of[p]].items()}
            groups.append({**group, "params": list(range(at, at + len(mine["params"])))})
            at += len(mine["params"])
        self.optim.load_state_dict({"state": local, "param_groups": groups})
        self.state = self.optim.state


def _cut(key: str, value: Any, param: nn.Parameter) -> Any:
    """This rank's part of a state of `param`, which may be whole here."""
    scalar = key == "step" and isinstance(value, torch.Tensor) and value.dim() == 0
    return value.clone() if scalar else _piece(value, param)


def _copy_options(source: list[dict], target: list[dict]) -> None:
    for a, b in zip(source, target, strict=True):
        b.update({k: v for k, v in a.items() if k != "params"})


def _on_host(values: dict[str, Any]) -> dict[str, Any]:
    return {k: v.detach().to("cpu", copy=True) if isinstance(v, torch.Tensor) else v for k, v in values.items()}
