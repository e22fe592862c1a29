"""`profile` inside the Trainer of transformers."""

from __future__ import annotations

from typing import Any


def trainer_callback(prof: Any, first: int = 1, last: int = 3):
    """A callback that enters the profile `prof` when step `first` begins and leaves it when step `last` ends (counted
    from 0); the report is `prof.report` then."""
    from transformers import TrainerCallback

    class ProfileCallback(TrainerCallback):
        """Measures memory during some steps."""

        def __init__(self):
            self.running = False

        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == first and not self.running:
                prof.__enter__()
                self.running = True

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step > last:
                self._leave()

        def on_train_end(self, args, state, control, **kwargs):
            self._leave()

        def _leave(self):
            if self.running:
                self.running = False
                prof.__exit__(None, None, None)

    return ProfileCallback()
