"""An OpenEnv server: guess a number. `flaw` of a reset makes it break in the step after."""

import math

from openenv.core import Action, Environment, Observation, State


class Guess(Action):
    guess: int


class Hint(Observation):
    hint: str


class Game(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, flaw="", **_options):
        if flaw == "reset":
            raise OSError("no sandbox is left")
        self.number, self.flaw = seed % 10, flaw
        return Hint(hint="Guess a number below 10.")

    def step(self, action, timeout_s=None, **_options):
        match self.flaw:
            case "step":
                raise OSError("the sandbox is gone")
            case "nan":
                return Hint(hint="over", reward=math.nan, done=True)
            case "text":
                return Hint(hint="over", reward="good", done=True)
        right = action.guess == self.number
        hint = "right" if right else "higher" if action.guess < self.number else "lower"
        return Hint(hint=hint, reward=1.0 if right else -0.25, done=right)

    @property
    def state(self):
        return State()
