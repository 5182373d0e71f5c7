"""An environment for `verifiers`: sums, with two weighted rewards and a metric; `tool` gives the model a calculator."""

import math

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class Calculator(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class SumConfig(vf.TaskConfig):
    tool: bool = False
    flaw: str = ""
    """What the reward `right` does instead: `nan`, `text` or `raises`."""
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData, vf.State, SumConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(config.tools)] if config.tool else []

    @vf.reward
    async def right(self, trace):
        match self.config.flaw:
            case "nan":
                return math.nan
            case "text":
                return "very good"
            case "raises":
                raise OSError("the checker is down")
        return float(trace.last_reply.strip() == str(self.data.answer))

    @vf.reward(weight=0.5)
    async def short(self, trace):
        return 1.0 if len(trace.last_reply) < 5 else 0.0

    @vf.metric
    async def letters(self, trace):
        return len(trace.last_reply)


class SumsConfig(vf.TasksetConfig):
    task: SumConfig = SumConfig()
    offline: bool = False


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        if self.config.offline:
            raise ConnectionError("no route to huggingface.co\nwhile sums were downloaded")
        for number in range(20):
            yield SumTask(SumData(prompt=f"What is {number} + {number}?", answer=2 * number), self.config.task)


if __name__ == "__main__":  # how verifiers starts the tools
    Calculator.run()
