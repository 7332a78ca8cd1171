"""Everything that the routes work on, made once by the server.

Owns the list, no behaviour.  Built by server.py and by tests; routes take it in `create_app`.
"""

from dataclasses import dataclass, field

from slackwater_inference.asr import Transcriber
from slackwater_inference.cloning import Cloner, VoiceLibrary
from slackwater_inference.config.api import ApiSettings
from slackwater_inference.engine import Engine
from slackwater_inference.store.keys import KeyStore
from slackwater_inference.store.voices import VoiceStore


@dataclass(frozen=True, slots=True)
class Services:
    """What the API stands on.

    keys: None lets everybody in, as the user "self" without limits; a key store without a key lets nobody in.
    asr: None makes /v1/asr answer 503.
    """

    engine: Engine
    voices: VoiceStore
    library: VoiceLibrary
    cloner: Cloner
    keys: KeyStore | None = None
    asr: Transcriber | None = None
    settings: ApiSettings = field(default_factory=ApiSettings)
