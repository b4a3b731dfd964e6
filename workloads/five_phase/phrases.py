"""Words of ours: what the tenants' system prompts say, and what users and assistants say to them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Domain:
    """The language of one tenant. `{topic}` and `{number}` are filled in from what stands beside them."""

    persona: str
    topics: tuple[str, ...]
    rules: tuple[str, ...]
    questions: tuple[str, ...]
    answers: tuple[str, ...]
    numbers: tuple[int, ...] = (7, 30, 120)

    def expand(self, templates: tuple[str, ...]) -> list[str]:
        """Every template with every topic and, where it asks for one, every number."""
        return [
            template.format(topic=topic, number=number)
            for topic in self.topics
            for template in templates
            for number in (self.numbers if "{number}" in template else self.numbers[:1])
        ]

    def rule(self, index: int) -> str:
        """The rule of that index; there are as many as a system prompt of any length needs."""
        topic = self.topics[(index + index // len(self.rules)) % len(self.topics)]
        text = self.rules[index % len(self.rules)].format(topic=topic, number=index + 2)
        return f"Rule {index + 1}: {text}\n"


_SUPPORT_RULES = (
    "When the customer writes about {topic}, ask for the reference first and never guess it.",
    "Promise nothing on {topic} that takes less than {number} hours.",
    "Hand {topic} over to a colleague after the second failed attempt, and say who will call.",
    "Keep a reply on {topic} under {number} sentences unless steps are asked for.",
    "Never repeat personal data that came up while talking about {topic}.",
    "If {topic} is part of a known outage, say so before anything else.",
)
_SUPPORT_QUESTIONS = (
    " My {topic} has been wrong since this morning, what can I do about it?",
    " I was told {topic} would be settled within {number} hours, and nothing happened.",
    " Could you explain once more how {topic} works for a second person in the household?",
    " The page about {topic} shows an error after I sign in.",
    " Who do I write to if {topic} goes wrong again?",
    " Is there a way to change {topic} without calling you?",
)
_SUPPORT_ANSWERS = (
    " Thank you for waiting, I have your {topic} open in front of me now.",
    " The last change to your {topic} was made {number} hours ago and has been confirmed.",
    " Please open the settings, choose {topic}, and tell me what the second line says.",
    " If that does not help, I will pass {topic} to a colleague who can see the log.",
    " You will not be charged for {topic} while we are looking into it.",
    " We usually settle questions about {topic} within {number} hours.",
    " I am sorry for the trouble that {topic} has caused you.",
    " As a next step, sign out on every device and try {topic} once more.",
    " I have added a note about {topic} to your case, so nobody will ask you twice.",
)

FINANCE = Domain(
    persona="You are the assistant of a private bank. You explain, you do not sell.\n",
    topics=(
        "the bond fund",
        "the savings plan",
        "the currency hedge",
        "the mortgage offer",
        "the dividend",
        "the quarterly statement",
        "the credit line",
        "the pension account",
    ),
    rules=(
        "State the date of every figure on {topic}, and say when it is older than {number} days.",
        "Never recommend buying or selling {topic}; describe the choices and what each costs.",
        "Name the largest risk of {topic} before its return.",
        "If the client asks about taxes on {topic}, point to the adviser and stop there.",
        "Round amounts on {topic} to {number} units and give the range, not a single value.",
        "Answer in the client's language, with the terms of the contract on {topic}.",
    ),
    questions=(
        " How did {topic} do over the last {number} days?",
        " What would it cost me to leave {topic} early?",
        " Does a rate rise change anything for {topic}?",
        " Can I put {number} thousand more into {topic} this year?",
        " Which fees of {topic} are fixed and which depend on the market?",
        " What happens to {topic} if I move abroad?",
    ),
    answers=(
        " As of the last close, {topic} stood within one percent of where it was {number} days before.",
        " The cost of {topic} has two parts: a yearly fee, and a charge for each change you order.",
        " Leaving {topic} before its term costs {number} units for every thousand, whatever the market does.",
        " The largest risk of {topic} is that rates rise faster than the contract allows it to follow.",
        " I can show what {topic} would have done in earlier years, but that says little about the next.",
        " For taxes on {topic} please speak to your adviser, who knows the rest of your situation.",
        " You can change the amount for {topic} once a quarter, up to {number} thousand, without a fee.",
        " The statement lists {topic} under the second heading, with the date of each figure beside it.",
        " In short, {topic} is meant for money that you will not need for some years.",
    ),
)


def _support(persona: str, *topics: str) -> Domain:
    return Domain(persona, topics, _SUPPORT_RULES, _SUPPORT_QUESTIONS, _SUPPORT_ANSWERS)


CHAT: dict[str, Domain] = {
    "gold-a": FINANCE,
    "silver-0": _support(
        "You help the customers of a broadband provider. Be brief and concrete.\n",
        "router", "landline number", "fibre upgrade", "monthly bill", "mail address", "engineer visit",
    ),
    "silver-1": _support(
        "You help people who travel by train and by night bus. Be calm and exact.\n",
        "seat reservation", "season ticket", "delay refund", "bicycle space", "lost luggage", "group fare",
    ),
    "silver-2": _support(
        "You help the shoppers of a household store. Be friendly and practical.\n",
        "parcel", "return label", "gift card", "washing machine", "warranty", "loyalty account",
    ),
}  # fmt: skip

_READING_RULES = (
    "Quote {topic} word for word before you explain it.",
    "If {topic} is not in the document, say so and add nothing.",
    "Mention the line on which {topic} begins, within {number} lines.",
    "Keep names in {topic} exactly as they are written.",
)
READING: dict[str, Domain] = {
    "bronze-0": Domain(
        "You answer questions of a platform team from the one source file below.\n",
        ("a definition", "a default value", "an error message", "a comment"), _READING_RULES, (), (),
    ),
    "bronze-1": Domain(
        "You prepare reviews: read the one source file below and answer from it alone.\n",
        ("a signature", "a condition", "a docstring", "a limit"), _READING_RULES, (), (),
    ),
}  # fmt: skip

COMPLETION: dict[str, Domain] = {
    "gold-b": Domain(
        "Continue the Python file at the cursor. Write code only.\n",
        ("a block", "an argument list", "a comment", "an import"),
        (
            "Finish {topic} in the style of the lines above it.",
            "Stop after {topic} once its indentation ends.",
            "Do not repeat {topic} that the file has already.",
        ),
        (),
        (),
    ),
}

USER = "\nUser:"
ASSISTANT = "\nAssistant:"
REFERENCE = " Reference {}."
DOCUMENT = "\nDocument {number}, from {path}:\n"
QUOTE = ' Question {number}: quote the passage that begins with "'
QUOTE_END = '" and say what it does.'
FOUND = " The document says:\n"


def system_prompt(domain: Domain, version: str) -> str:
    """The head of a system prompt, to be followed by as many rules as its length asks for."""
    return f"System prompt {version}. {domain.persona}"


def all_text() -> str:
    """Every word of this module once: part of the vocabulary and of the corpus's sha256."""
    domains = [*CHAT.values(), *READING.values(), *COMPLETION.values()]
    lines = [USER, ASSISTANT, REFERENCE, DOCUMENT, QUOTE, QUOTE_END, FOUND, " ".join(map(str, range(1000)))]
    for domain in domains:
        lines += [system_prompt(domain, "v1"), system_prompt(domain, "v2")]
        lines += [domain.rule(i) for i in range(len(domain.rules) * len(domain.topics))]
        lines += domain.expand(domain.questions) + domain.expand(domain.answers)
    return "\n".join(lines)
