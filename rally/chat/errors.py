"""What goes wrong with a chat template is told in one sentence."""

from rally.types import RallyError


class TemplateError(RallyError):
    """The chat template cannot do what is asked of it."""
