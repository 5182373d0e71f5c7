"""DSPy's language model, which asks by LiteLLM."""

import dspy
from answers import BASE_URL, FOLLOW_UP, KEY, MODEL, QUESTION, tell

model = dspy.LM(f"openai/{MODEL}", api_base=BASE_URL, api_key=KEY, cache=False)
messages = [{"role": "user", "content": QUESTION}]
for _ in range(2):
    [answer] = model(messages=messages)
    text = answer if isinstance(answer, str) else answer["text"]
    tell(text)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": FOLLOW_UP}]
