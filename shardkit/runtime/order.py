"""Agreement between ranks on the order of collectives.

Ranks that take different branches (experts, a skipped tower, a last short batch) would pair up the gathers of
different units: a hang, or silently a mixture of two units' weights. So every collective of the engine is requested
through an `Order`, which works in two ways:

    in step    Before each collective the ranks exchange which one they want (a host message of a few bytes). Where
               they agree, it runs. Where they do not, all ranks take part in each of the wanted ones, in a fixed
               order: whoever did not want it contributes its shard to a gather, or zeros to a reduction.
    by heart   After a stretch in which all ranks asked for the same sequence, the next such stretch does without
               messages as long as this rank follows that sequence. A rank that needs something else first helps the
               others through the rest of the sequence, which it knows, up to the next meeting, and says there that it
               left; from then on the stretch goes on in step.

A stretch is what lies between two meetings. Ranks meet when a root ends a forward or a backward: there they serve
whoever is not done, and learn whether all followed.
"""

from __future__ import annotations

import contextlib
import zlib
from typing import TYPE_CHECKING

from ..comm import Channel
from ..errors import OrderError

if TYPE_CHECKING:
    from .step import Step

GATHER, GATHER_NEAR, REDUCE, CAPTURE, STEP, END = range(6)
FORWARD, EVALUATION, BACKWARD, BROKEN, JOINED = range(5)
_WHAT = ("ended a forward", "ended an evaluation", "ended a backward", "raised an exception", "left join()")

# How many identical stretches are needed before ranks go by heart; doubled whenever a sequence changes.
# Two at first: the first step does not know yet which unit comes last, and gathers it once more.
_PATIENCE, _MAX_PATIENCE = 2, 64

Wish = tuple[int, int, int]  # what, index of the flat parameter, root


class Unchecked:
    """Every request is carried out at once: one rank, a fake world, or `check_order=False`."""

    def request(self, step: Step, what: int, index: int) -> None:
        step.perform(what, index)

    def end(self, step: Step, kind: int, all_used: bool = True) -> bool:
        return all_used

    def broke_off(self, step: Step) -> None:
        pass

    def forget(self) -> None:
        pass


class Order:
    """One per channel, shared by all roots on it; see the module docstring."""

    def __init__(self, channel: Channel):
        self.channel = channel
        self._asked: list[Wish] = []  # in this stretch
        self._script: list[Wish] | None = None  # what this stretch follows by heart
        self._begun = False
        self._last_end = (END, END)  # (kind, root) of the last meeting: what kind of stretch comes next
        self._known: dict[tuple[int, int], list[Wish]] = {}
        self._seen: dict[tuple[int, int], tuple[int, int]] = {}  # (fingerprint of the last sequence, times in a row)
        self._patience: dict[tuple[int, int], int] = {}
        self._torn: set[tuple[int, int]] = set()  # (index, root) captured in this stretch by some ranks only
        self.in_step_only = 0  # inside join(): a rank that is done cannot follow a script

    @staticmethod
    def of(channel: Channel | None) -> Order | Unchecked:
        if channel is None:
            return Unchecked()
        if channel.order is None:
            channel.order = Order(channel)
        return channel.order

    def __deepcopy__(self, memo):
        return self

    def request(self, step: Step, what: int, index: int) -> None:
        """Carries out GATHER, REDUCE or CAPTURE of flat parameter `index` of a root, together with all other ranks."""
        self._begin()
        wish = (what, index, step.root_id)
        at, script = len(self._asked), self._script
        self._asked.append(wish)
        if script is not None:
            if at < len(script) and script[at] == wish:
                step.perform(what, index)
                return
            self._leave(at)
        while wish not in self._carry_out(self.channel.exchange(wish), own=wish):
            pass  # a capture waits for the ranks that have other wishes

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._script = None if self.in_step_only else self._known.get(self._last_end)

    def _leave(self, at: int) -> None:
        """This rank departs from the script: help the others through the rest of it, then say so where they meet."""
        assert self._script is not None
        for what, index, root in self._script[at:]:
            if root in self.channel.roots:  # else its model was deleted, on every rank
                self.channel.roots[root].serve(what, index)
        self._script = None
        self._meet((END, *self._last_end, 1, 0), expect=None)

    def _carry_out(self, messages, own: Wish | None = None) -> list[Wish]:
        """Performs or serves the wishes among `messages`, and returns those it did. None: every rank is at an end."""
        if any(m[0] == END and m[1] == JOINED for m in messages):
            for step in self.channel.roots.values():
                step.mesh.shard.absent = True
        wishes = sorted({m[:3] for m in messages if m[0] != END}, key=lambda w: (w[2], w[0], w[1]))
        wishes = self._that_can_be(wishes, messages)
        if len({m[:3] for m in messages}) > 1 and any(w[0] == GATHER_NEAR for w in wishes):
            raise OrderError(
                "ranks run different units, and reshard_after_forward=n keeps parameters only on ranks that ran them: "
                + "; ".join(f"rank {r} wants {m[:2]}" for r, m in enumerate(messages))
                + ". Use reshard_after_forward=True."
            )
        for wish in wishes:
            what, index, root = wish
            step = self.channel.roots[root]
            if wish == own:
                step.perform(what, index)
            else:
                step.serve(what, index)
        return wishes

    def _that_can_be(self, wishes: list[Wish], messages) -> list[Wish]:
        """`wishes` without captures that must wait. A captured gradient is used at once, so all ranks must add to it in
        the same round: those that want something else first may still come to it."""
        captures = [w for w in wishes if w[0] == CAPTURE]
        if not captures or len({m[:3] for m in messages}) == 1:
            return wishes
        if len(captures) < len(wishes):
            return [w for w in wishes if w[0] != CAPTURE]
        again = [w for w in captures if w[1:] in self._torn]
        if again:
            raise OrderError(
                f"torch.autograd.grad asked for gradients of flat parameter {again[0][1]} at different times on "
                "different ranks, which use their units in different orders; a part of it was handed out already. "
                "Use backward()."
            )
        self._torn.update(w[1:] for w in captures)
        return captures

    def _meet(self, message, expect: tuple[int, int] | None):
        """Serves others until every rank is at an end; returns their messages. `expect`: the end that this rank has
        reached and that the others must have reached, too; None where this rank only passes by."""
        while True:
            messages = self.channel.exchange(message)
            if self._carry_out(messages):
                continue
            if any(m[3] for m in messages) and expect is not None:
                self._script = None  # somebody left the script: it goes on in step, and comes here again
                continue
            ends = {m[1:3] for m in messages if not m[3] and m[1] != JOINED}
            if expect is not None and len(ends | {expect}) > 1:
                raise OrderError(
                    "ranks are in different steps: "
                    + "; ".join(f"rank {r} {_WHAT[m[1]]} of root {m[2]}" for r, m in enumerate(messages))
                    + ". Every rank must run the same number of forwards and backwards: give all ranks equally many "
                    "batches, and skip a bad batch on all ranks or on none."
                )
            return messages

    def end(self, step: Step, kind: int, all_used: bool = True) -> bool:
        """Ends a forward or backward of a root: returns when every rank has. True if `all_used` on all of them."""
        end = (kind, step.root_id)
        self._begin()  # even without a request: the others may be going by heart through some
        script, asked = self._script, self._asked
        if script is not None and asked != script:
            self._leave(len(asked))  # shorter than the others' stretch: they still need this rank
        fingerprint = zlib.crc32(repr(asked).encode())
        messages = self._meet((END, *end, 0, fingerprint << 1 | int(all_used)), expect=end)
        self._learn(messages)
        self._asked, self._script, self._begun, self._last_end = [], None, False, end
        self._torn.clear()
        return all(m[4] & 1 for m in messages if m[1] != JOINED)

    def _learn(self, messages) -> None:
        """Decides, with the same outcome on every rank, whether the next stretch of this kind goes by heart."""
        key, prints = self._last_end, {m[4] >> 1 for m in messages}
        if len(prints) > 1 or self.in_step_only:
            self._known.pop(key, None)
            self._seen.pop(key, None)
            return
        (fingerprint,) = prints
        patience = self._patience.get(key, _PATIENCE)
        last, times = self._seen.get(key, (None, 0))
        if last is not None and last != fingerprint and self._known.pop(key, None) is not None:
            patience = min(2 * patience, _MAX_PATIENCE)  # be slower to trust the next sequence
            self._patience[key] = patience
        times = times + 1 if fingerprint == last else 1
        self._seen[key] = (fingerprint, times)
        if any(what in (GATHER_NEAR, CAPTURE) for what, _, _ in self._asked):
            return  # a rank that left such a sequence could not help the others through it
        if times >= patience and key not in self._known:
            self._known[key] = list(self._asked)

    def broke_off(self, step: Step) -> None:
        """A pass of this root ended in an exception: bring the ranks together again before anything else runs.

        Ranks that broke off at different places, or some that did not, are told so instead of being left waiting.
        """
        if not self._begun:
            return
        if self._script is not None:
            self._leave(len(self._asked))
        try:
            self._meet((END, BROKEN, step.root_id, 0, 0), expect=(BROKEN, step.root_id))
        finally:
            self.forget()

    def leave_join_broken(self, step: Step) -> None:
        """Tells the others, in one message, that an exception ends join() on this rank."""
        with contextlib.suppress(RuntimeError):  # where they are gone already
            self.channel.exchange((END, BROKEN, step.root_id, 0, 0))

    def forget(self) -> None:
        """Starts over: nothing is known by heart."""
        self._asked, self._script, self._begun, self._last_end = [], None, False, (END, END)
        self._torn.clear()
        self._known.clear()
        self._seen.clear()

    def serve_joined(self, step: Step):
        """This rank has no more batches: serves the others until every rank has joined. Yields (kind, all_used) of
        every pass that the others end meanwhile."""
        while True:
            messages = self.channel.exchange((END, JOINED, step.root_id, 0, 0))
            if self._carry_out(messages):
                continue
            ends = [m for m in messages if m[1] != JOINED]
            if not ends:
                return
            if any(m[1] == BROKEN for m in ends):
                raise OrderError("a rank raised an exception inside join(); this rank, which served it, ends as well.")
            yield ends[0][1], all(m[4] & 1 for m in ends)
