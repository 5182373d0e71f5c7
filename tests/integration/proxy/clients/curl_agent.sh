#!/usr/bin/env bash
# A tool loop with nothing but curl, and Python to read JSON.
set -euo pipefail
tool='{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}'
messages='[{"role": "user", "content": "What is 1 + 2 + 3 + 4?"}]'
while :; do
  answer=$(curl -sS --fail-with-body "$AGENT_BASE_URL/chat/completions" -H "Authorization: Bearer $AGENT_KEY" \
    -H 'Content-Type: application/json' -d "{\"model\": \"main\", \"messages\": $messages, \"tools\": [$tool]}")
  messages=$("$AGENT_PYTHON" - "$messages" "$answer" <<'PYTHON'
import json, sys

messages, answer = map(json.loads, sys.argv[1:])
message = answer["choices"][0]["message"]
results = [
    {"role": "tool", "tool_call_id": call["id"], "content": str(sum(json.loads(call["function"]["arguments"]).values()))}
    for call in message.get("tool_calls", ())
]
print(json.dumps([*messages, message, *results]))
PYTHON
  )
  if ! grep -q '"role": "tool"[^}]*}]$' <<<"$messages"; then break; fi
done
"$AGENT_PYTHON" -c 'import json, sys; print(json.loads(sys.argv[1])[-1]["content"])' "$messages"
