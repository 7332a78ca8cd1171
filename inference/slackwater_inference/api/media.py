"""What kind of file some bytes are, by how they begin.

Owns the few kinds that we serve again.  A browser is told this and never guesses, so an upload cannot become a page.
"""

_UNKNOWN = "application/octet-stream"
_FTYP_AT = 4  # MP4's first box: its length, then "ftyp"


def audio_type(data: bytes) -> str:
    """The media type of a recording; `application/octet-stream` for one that browsers do not play anyway."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "audio/wav"
    if data[:4] == b"fLaC":
        return "audio/flac"
    if data[:4] == b"OggS":
        return "audio/ogg"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "audio/webm"
    if data[_FTYP_AT : _FTYP_AT + 4] == b"ftyp":
        return "audio/mp4"
    if data[:3] == b"ID3" or (len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0):
        return "audio/mpeg"
    return _UNKNOWN


def image_type(data: bytes) -> str | None:
    """The media type of a cover: PNG, JPEG, WebP or GIF; None for anything else."""
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return "image/png"
    if data[:3] == b"\xff\xd8\xff":
        return "image/jpeg"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return "image/gif"
    return None
