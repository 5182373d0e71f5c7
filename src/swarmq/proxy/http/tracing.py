"""OpenTelemetry tracing (`proxy.traces`): a span for each model call, with first token and confirm as events.

The exporter is configured by OpenTelemetry's environment variables (`OTEL_EXPORTER_OTLP_ENDPOINT`, ...). Attributes follow its
conventions for generative models where there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from swarmq.messages import Turn

Watcher = Callable[[Turn, float], None]


@contextmanager
def export_spans(run: str, number: int) -> Iterator[Watcher]:
    """Yield a watcher whose spans are exported, and flush at the end."""
    resource = Resource.create({SERVICE_NAME: "swarmq-proxy", "swarmq.run": run, "swarmq.proxy": number})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    try:
        yield span_watcher(provider)
    finally:
        provider.shutdown()


def span_watcher(provider: TracerProvider) -> Watcher:
    """Return a watcher that makes a span of every confirmed turn."""
    tracer = provider.get_tracer("swarmq.proxy")

    def watch(turn: Turn, confirm_s: float) -> None:
        began_at, total_s = turn.timings.began_at, turn.timings.total_s
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": turn.policy,
            "gen_ai.request.temperature": turn.sampling.temperature,
            "gen_ai.response.id": turn.call_id,
            "gen_ai.response.finish_reasons": (turn.finish_reason,),
            "gen_ai.usage.output_tokens": turn.num_sampled,
            "gen_ai.usage.input_tokens": turn.num_prompt,
            "gen_ai.conversation.id": turn.episode_id,
            "swarmq.mode": turn.mode,
            "swarmq.branch": turn.branch or "",
            "swarmq.agent": turn.agent or "",
        }
        span = tracer.start_span(
            f"chat {turn.policy}", kind=SpanKind.SERVER, attributes=attributes, start_time=_nanoseconds(began_at)
        )
        span.add_event("first token", timestamp=_nanoseconds(began_at + turn.timings.first_token_s))
        span.add_event("sampled", timestamp=_nanoseconds(began_at + total_s))
        span.end(_nanoseconds(began_at + total_s + confirm_s))

    return watch


def _nanoseconds(at: float) -> int:
    return int(at * 1e9)
