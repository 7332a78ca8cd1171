"""What the HTTP API allows: model names and prices, sizes, times.  Owns names and checks, no behaviour."""

from decimal import Decimal

from pydantic import Field

from slackwater_inference.config.settings import Settings

_FREE, _PAID = Decimal(0), Decimal(15)  # per million UTF-8 bytes, as the hosted service asks


class ApiSettings(Settings):
    """What the HTTP API allows."""

    prices: dict[str, Decimal] = Field(
        default={
            "s2.1-pro-free": _FREE,
            "s2.1-pro": _PAID,
            "s2-pro": _PAID,
            "s1": _PAID,
            "s1-mini": _PAID,
            "speech-1.5": _PAID,
            "speech-1.6": _PAID,
            "agent-x0": _PAID,
        }
    )
    """Price of a million UTF-8 bytes of text for each public model name; they all name the one loaded model.  The
    last four are names that older clients send."""
    default_model: str = "s2.1-pro"
    """A missing or unknown `model` header means this one, as it does at the hosted service."""
    max_text_bytes: int = Field(default=200_000, ge=1)
    """UTF-8 bytes of one request's text: some two and a half hours of speech.  A longer one is better sent in parts."""
    max_asr_seconds: float = Field(default=3600.0, gt=0)
    """Longest recording that is transcribed; at 16 kHz an hour takes 230 MB in memory."""
    connection_limit_s: float = Field(default=3600.0, gt=0)
    """Longest life of a websocket, as at the hosted service."""
    idle_limit_s: float = Field(default=300.0, gt=0)
    """A websocket whose client says nothing and hears nothing for so long is closed: it holds a voice's pages."""
    start_limit_s: float = Field(default=30.0, gt=0)
    """A websocket whose first message has not come by then is closed."""
    send_limit_s: float = Field(default=60.0, gt=0)
    """A speech answer or websocket whose client reads nothing for so long is cut."""
    body_limit_s: float = Field(default=30.0, gt=0)
    """A request of whose body nothing comes for so long is refused: its client has vanished, and counts meanwhile."""
    max_open_requests: int = Field(default=256, ge=1)
    """Speech requests, transcriptions and websockets at once, over all keys: bounds the server's memory."""
    max_held_bytes: int = Field(default=512 * 1024 * 1024, ge=1)
    """Bodies of all open requests together: bounds the server's memory, too, since each may have 32 MiB."""

    def model_of(self, header: str | None) -> str:
        """The public model name that a request's `model` header asks for."""
        return header if header is not None and header in self.prices else self.default_model
