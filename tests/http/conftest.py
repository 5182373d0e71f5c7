from support.stage import anthropic, openai, stage, stages

__all__ = ["anthropic", "openai", "stage", "stages"]
