"""Output that must match a grammar: compiled in a process of its own, followed by one matcher per sample."""

from diptych.engine.grammar.compiler_link import CompilerLink
from diptych.engine.grammar.errors import GrammarRefused
from diptych.engine.grammar.grammars import Grammars
from diptych.engine.grammar.matcher import Matcher
from diptych.engine.grammar.waiting import WaitingForGrammar

__all__ = ["CompilerLink", "GrammarRefused", "Grammars", "Matcher", "WaitingForGrammar"]
