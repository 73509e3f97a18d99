"""Generated dialogues for the demo model: importing the package registers every generator.

`stream(seed)` yields them; `GENERATORS` lists them.
"""

from . import (
    arithmetic,
    copying,
    explain,
    extraction,
    facts,
    lists,
    long_form,
    python_code,
    smalltalk,
    stories,
    tools,
    units,
)
from .base import (
    GENERATORS,
    Dialogue,
    DuplicateGeneratorError,
    Generator,
    Message,
    ToolCall,
    is_held_out,
    stream,
)

__all__ = [
    "GENERATORS",
    "Dialogue",
    "DuplicateGeneratorError",
    "Generator",
    "Message",
    "ToolCall",
    "arithmetic",
    "copying",
    "explain",
    "extraction",
    "facts",
    "is_held_out",
    "lists",
    "long_form",
    "python_code",
    "smalltalk",
    "stories",
    "stream",
    "tools",
    "units",
]
