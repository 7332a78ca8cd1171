"""What every group of settings shares.

Owns the rules for unknown keys and mutation.  Imported by the other modules of `config`.
"""

from pydantic import BaseModel, ConfigDict, Field

Positive = Field(gt=0)


class Settings(BaseModel):
    """Frozen; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
