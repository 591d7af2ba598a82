"""Small shapes of training data as people bring them, and what becomes of each on the model that ships."""

import json
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
AUTO, DPO, KTO = ("dataset=auto",), ("recipe=dpo", "dataset=auto"), ("recipe=kto", "dataset=auto")
DPO_TEXT = ("recipe=dpo", "dataset=preference_text")
WRITES_THOUGHTS = ("model.chat_template=qwen3",)


@dataclass(frozen=True)
class Shape:
    """A file, and the first sample that is made of it, with trained text in double brackets.

    Where it stops: words of the message, and the samples that its commands make, the one that reads the column first;
    empty where the command stops at another column.
    """

    name: str
    rows: Row | list[Row] | str  # a row stands three times in the file
    trained: str = ""
    stop: str = ""
    commands: tuple[str, ...] = ()
    words: tuple[str, ...] = AUTO
    model: tuple[str, ...] = ()
    file: str = "rows.jsonl"


def chat(*contents: str) -> list[Row]:
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(contents)]


def asked(question: str, answer: str, system: str = "") -> str:
    opening = f"<|system|>{system}<|end|>" if system else ""
    return f"{opening}<|user|>{question}<|end|><|assistant|>[[{answer}<|end|>]]"


def both(question: str, system: str = "", *answers: str) -> str:
    return "".join(asked(question, answer, system) for answer in answers or ("It is two.", "No idea."))


def thought(answer: str, question: str = "What is one?") -> str:
    said = f"[[<think>\nWe add one.\n</think>\n\n{answer}<|im_end|>]]"
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{said}\n"


QA: Row = {"question": "What is one?", "answer": "The first."}
ANSWERED = asked("What is one?", "The first.")
PAIR: Row = {"chosen": "It is two.", "rejected": "No idea."}
ASKS = "What is after 1?"
TURN: Row = {"from": "human", "value": ASKS}
TALK: Row = {"messages": chat("Hi", "Yo")}
TALKED = asked("Hi", "Yo")
RAIN = "It rains today."
ALONE = "I[[t is two.<|end|>]]N[[o idea.<|end|>]]"
WITH_RAIN = (asked(f"What is one?\n\n{RAIN}", "The first."), ANSWERED)
WITHOUT_PROMPT = "the answers would be trained without their prompt: "
NEEDED = "the answers may need it: "
TEXT_ALONE = "text alone would be trained: "
MARS = {"question": "Which?", "answer": "B"}
MARS_CHOICES = (asked("Which?\n\nA. Mars\nB. Venus", "B"), asked("Which?", "B"))
HH = "\n\nHuman: Hi\n\nAssistant:"
HH_BOTH = f"{HH}[[ Hello<|end|>]]{HH}[[ No<|end|>]]"
BRIEF = "Be brief and kind."
JSON_LINES = '{"question": "What is one?", "answer": "The first."}\n' * 3
CONLL = "-DOCSTART- -X- O O\n\nBob NNP B-NP B-PER\nruns VB O O\n\nIn IN O O\nParis NNP B-NP B-LOC\n"
CHOSEN = ("chosen_messages", "rejected_messages")
JUDGED = "which judges the answers as wrong or right"

PAIRS = (
    Shape("dpo-instruction", {"instruction": ASKS, **PAIR}, both(ASKS), words=DPO),
    Shape("dpo-alpaca", {"instruction": "Add.", "input": "1, 2", **PAIR}, both("Add.\n\n1, 2"), words=DPO),
    Shape("dpo-question", {"question": ASKS, **PAIR}, both(ASKS), words=DPO),
    Shape("dpo-prompt", {"prompt": ASKS, **PAIR}, both(ASKS), words=DPO),
    Shape("dpo-prompt-list", {"prompt": chat(ASKS), **PAIR}, both(ASKS), words=DPO),
    Shape("dpo-conversations", {"conversations": [TURN], **PAIR}, both(ASKS), words=DPO),
    Shape(
        "dpo-turns",
        {"conversations": [TURN], **{name: {"from": "gpt", "value": said} for name, said in PAIR.items()}},
        both(ASKS),
        words=DPO,
    ),
    Shape("dpo-messages", {"messages": chat(ASKS), **PAIR}, both(ASKS), words=DPO),
    Shape(
        "dpo-whole-chats",
        {"question": ASKS, "chosen": chat(ASKS, "It is two."), "rejected": chat(ASKS, "No idea.")},
        both(ASKS),
        words=DPO,
    ),
    Shape("dpo-orca", {"system": BRIEF, "question": ASKS, **PAIR}, both(ASKS, BRIEF), words=DPO),
    Shape(
        "dpo-context",
        {"question": ASKS, "context": RAIN, **PAIR},
        stop=f"{NEEDED}context (3 of 3 rows)",
        commands=(both(f"{ASKS}\n\n{RAIN}"), both(ASKS)),
        words=DPO,
    ),
    Shape(
        "dpo-context-of-talk",
        {"prompt": chat(ASKS), "context": RAIN, **PAIR},
        stop=f"{NEEDED}context (3 of 3 rows)",
        commands=(both(ASKS, RAIN), both(ASKS)),
        words=DPO,
    ),
    Shape("dpo-hh", {"chosen": f"{HH} Hello", "rejected": f"{HH} No"}, HH_BOTH, words=DPO),
    Shape("dpo-hh-prompt", {"prompt": HH, "chosen": " Hello", "rejected": " No"}, HH_BOTH, words=DPO),
    Shape(
        "dpo-written-chat",
        {"prompt": "<|im_start|>user\nHi<|im_end|>", **PAIR},
        "".join(f"<|im_start|>user\nHi<|im_end|>[[{PAIR[name]}<|end|>]]" for name in PAIR),
        words=DPO,
    ),
    Shape(
        "dpo-unknown-name",
        {"said_before": "What is after one?", **PAIR},
        stop=f"{WITHOUT_PROMPT}said_before (3 of 3 rows)",
        commands=(both("What is after one?"), ALONE),
        words=DPO,
    ),
    Shape(
        "dpo-text-instruction",
        {"instruction": ASKS, **PAIR},
        stop=f"{WITHOUT_PROMPT}instruction (3 of 3 rows)",
        commands=(both(ASKS), ALONE),
        words=DPO_TEXT,
    ),
    Shape(
        "dpo-text-messages",
        {"messages": chat(ASKS), **PAIR},
        stop=f"{WITHOUT_PROMPT}messages (3 of 3 rows)",
        commands=(both(ASKS), ALONE),
        words=DPO_TEXT,
    ),
    Shape(
        "dpo-text-system",
        {"prompt": ASKS, "system": BRIEF, **PAIR},
        stop=f"{NEEDED}system (3 of 3 rows)",
        commands=(
            "".join(f"{BRIEF}\n\n{ASKS}[[{said}<|end|>]]" for said in PAIR.values()),
            "".join(f"{ASKS}[[{said}<|end|>]]" for said in PAIR.values()),
        ),
        words=DPO_TEXT,
    ),
    Shape(
        "dpo-text-prompt",
        {"prompt": ASKS, **PAIR},
        "".join(f"{ASKS}[[{said}<|end|>]]" for said in PAIR.values()),
        words=DPO_TEXT,
    ),
    Shape(
        "kto-question",
        [{"question": ASKS, "completion": "Two.", "label": bool(at % 2)} for at in range(4)],
        f"{asked(ASKS, 'Two.')}\n[[false]]",
        words=KTO,
    ),
)
OTHER_ANSWERS: tuple[tuple[str, Row, str, str], ...] = (
    (
        "chosen-messages",
        {"chosen_messages": chat(ASKS, "It is two."), "rejected_messages": chat(ASKS, "No idea.")},
        *CHOSEN,
    ),
    ("answer1", {"question": ASKS, "answer1": "It is two.", "answer2": "No idea."}, "answer1", "answer2"),
    (
        "response-j",
        {"question": ASKS, "response_j": "It is two.", "response_k": "No idea."},
        "response_j",
        "response_k",
    ),
    (
        "openai",
        {
            "input": {"messages": chat(ASKS)},
            "preferred_output": [{"role": "assistant", "content": "It is two."}],
            "non_preferred_output": [{"role": "assistant", "content": "No idea."}],
        },
        *("preferred_output", "non_preferred_output"),
    ),
)
PROPOSED_PAIRS = (
    *(
        Shape(
            f"dpo-{name}",
            rows,
            stop=f"If {chosen} is the chosen answer and {rejected} the rejected one, type: ",
            commands=(both(ASKS),),
            words=DPO,
        )
        for name, rows, chosen, rejected in OTHER_ANSWERS
    ),
    *(
        Shape(
            f"kto-{name}",
            [{**row, label: bool(at % 2)} for at in range(4)],
            stop=f"If {label} is true where the answer in {answer} is good, type: ",
            commands=(f"{asked(ASKS, 'Two.')}\n[[false]]",),
            words=KTO,
        )
        for name, row, answer, label in (
            ("answer", {"question": ASKS, "answer": "Two."}, "answer", "label"),
            ("messages", {"messages": chat(ASKS, "Two.")}, "messages", "label"),
            ("tag", {"instruction": ASKS, "input": "", "output": "Two."}, "output", "kto_tag"),
        )
    ),
)
TEXTS = (
    *(
        Shape(
            f"text-{name}",
            {"text": ASKS, name: found},
            stop=f"{TEXT_ALONE}{name} (3 of 3 rows)",
            commands=(asked(ASKS, "It is two."), "What[[ is after 1?<|end|>]]"),
        )
        for name, found in (
            ("summary", "It is two."),
            ("target", "It is two."),
            ("response", "It is two."),
            ("outputs", [{"text": "It is two."}, {"text": "Two."}]),
            ("replies", ["It is two.", "Two."]),
        )
    ),
    Shape(
        "text-prompt",
        {"prompt": ASKS, "text": "It is two."},
        stop=f"{TEXT_ALONE}prompt (3 of 3 rows)",
        commands=(asked(ASKS, "It is two."), "I[[t is two.<|end|>]]"),
    ),
    Shape(
        "text-question-reply",
        {"question": ASKS, "reply": "It is two.", "text": RAIN},
        stop=f"{TEXT_ALONE}question (3 of 3 rows), reply (3 of 3 rows)",
        commands=(asked(f"{ASKS}\n\n{RAIN}", "It is two."), "I[[t rains today.<|end|>]]"),
    ),
    Shape("text-class", {"text": RAIN, "target": "weather"}, "I[[t rains today.<|end|>]]"),
    Shape("text-label", {"text": RAIN, "label": 1}, "I[[t rains today.<|end|>]]"),
    Shape("text-about", {"text": RAIN, "title": "The rain of today", "url": "x y"}, "I[[t rains today.<|end|>]]"),
    Shape("text-written-out", {"text": f"Q: {ASKS} A: Two", "response": "Two"}, f"[[Q: {ASKS} A: Two<|end|>]]"),
    Shape(
        "messages-table",
        [
            {"message_id": "m0", "parent_id": None, "text": "Hi", "role": "prompter"},
            {"message_id": "m1", "parent_id": "m0", "text": "Yo", "role": "assistant"},
        ],
        stop=f"{TEXT_ALONE}role (2 of 2 rows), parent_id (1 of 2 rows)",
        commands=(TALKED, "H[[i<|end|>]]"),
    ),
    Shape(
        "messages-table-json",
        [
            {"id": 1, "parent_message_id": None, "text": "Hi", "role": "user"},
            {"id": 2, "parent_message_id": 1, "text": "Yo", "role": "assistant"},
        ],
        stop="role (2 of 2 rows)",
        commands=(TALKED, "H[[i<|end|>]]"),
        file="rows.json",
    ),
    Shape(
        "json-in-txt",
        JSON_LINES,
        stop="its lines are JSON objects, which would be trained as one plain text",
        commands=(ANSWERED, f"[[{JSON_LINES}<|end|>]]"),
        file="rows.txt",
    ),
    Shape(
        "conll-in-txt",
        CONLL,
        stop="its lines are words with their tags, which would be trained as one plain text",
        commands=("[[B]]ob[[ runs]]\n[[B-PER O]]", f"[[{CONLL}<|end|>]]"),
        file="rows.txt",
    ),
    Shape("prose-in-txt", "It rains today.\n", "I[[t rains today.\n<|end|>]]", file="rows.txt"),
)
THOUGHTS = (
    Shape(
        "thought",
        {**QA, "reasoning": "We add one."},
        stop=f"{NEEDED}reasoning (3 of 3 rows)",
        commands=(asked("What is one?", "We add one.\n\nThe first."), ANSWERED),
    ),
    *(
        Shape(f"thought-{name}", {**QA, name: "We add one."}, thought("The first."), model=WRITES_THOUGHTS)
        for name in ("reasoning", "thinking", "rationale", "Complex_CoT")
    ),
    Shape(
        "thought-typed",
        {**QA, "rationale": "We add one."},
        thought("The first."),
        words=("dataset=question_answer",),
        model=WRITES_THOUGHTS,
    ),
    Shape(
        "thought-of-messages",
        {**TALK, "thinking": "We add one."},
        stop=f"{NEEDED}thinking (3 of 3 rows)",
        commands=(thought("Yo", "Hi"), TALKED),
    ),
    Shape(
        "thought-of-instruction",
        {"instruction": "q", "input": "", "output": "a", "thinking": "We add one."},
        stop=f"{NEEDED}thinking (3 of 3 rows)",
        commands=(asked("q", "We add one.\n\na"), asked("q", "a")),
    ),
    Shape("thought-in-answer", {**QA, "rationale": "The first"}, ANSWERED),
    Shape("thought-switch", {**QA, "reasoning": "on", "thinking": True}, ANSWERED),
)
CHOICE_COLUMNS: tuple[Row, ...] = (
    {"choices": ["Mars", "Venus"]},
    {"options": ["A. Mars", "B. Venus"]},
    {"options": {"A": "Mars", "B": "Venus"}},
    {"choices": {"text": ["Mars", "Venus"], "label": ["A", "B"]}},
    {"choices": [{"label": "A", "text": "Mars"}, {"label": "B", "text": "Venus"}]},
    {"choices": [{"text": "Mars"}, {"text": "Venus"}]},
    {"A": "Mars", "B": "Venus"},
    {"opa": "Mars", "opb": "Venus"},
    {"option_a": "Mars", "option_b": "Venus"},
)
CHOICES = (
    *(
        Shape(
            f"choices-{at}", {**MARS, **found}, stop=f"{NEEDED}{next(iter(found))} (3 of 3 rows)", commands=MARS_CHOICES
        )
        for at, found in enumerate(CHOICE_COLUMNS)
    ),
    Shape(
        "choices-in-question",
        {"question": "Which? A) Mars B) Venus", "options": ["Mars", "Venus"], "answer": "B"},
        asked("Which? A) Mars B) Venus", "B"),
    ),
    Shape("options-of-request", {**QA, "options": {"temperature": 0.5}}, ANSWERED),
    Shape("one-choice-column", {**QA, "A": "x"}, ANSWERED),
)
CONTEXTS = (
    *(
        Shape(f"context-{name}", {**QA, name: RAIN}, stop=f"{NEEDED}{name} (3 of 3 rows)", commands=WITH_RAIN)
        for name in ("paragraph", "article", "evidence", "create_table", "input")
    ),
    Shape(
        "context-of-few-rows",
        [{**QA, "context": RAIN}, {**QA, "context": RAIN}, QA],
        stop=f"{NEEDED}context (2 of 3 rows)",
        commands=WITH_RAIN,
    ),
    Shape(
        "context-twice",
        {**QA, "context": RAIN, "evidence": "It was wet."},
        stop=f"{NEEDED}context (3 of 3 rows), evidence (3 of 3 rows)",
        commands=(asked(f"What is one?\n\n{RAIN}\n\nIt was wet.", "The first."), ANSWERED),
    ),
    Shape(
        "context-list",
        {**QA, "contexts": ["It rains.", "It is late."]},
        stop=f"{NEEDED}contexts (3 of 3 rows)",
        commands=(asked("What is one?\n\nIt rains.\nIt is late.", "The first."), ANSWERED),
    ),
    Shape(
        "context-object",
        {**QA, "schema": {"type": "object", "title": "a thing"}},
        stop=f"{NEEDED}schema (3 of 3 rows)",
        commands=(asked('What is one?\n\n{"type": "object", "title": "a thing"}', "The first."), ANSWERED),
    ),
    Shape(
        "context-completion",
        {"prompt": "Say it.", "completion": " It is.", "context": RAIN},
        stop=f"{NEEDED}context (3 of 3 rows)",
        commands=(asked(f"Say it.\n\n{RAIN}", " It is."), "Say it.[[ It is.<|end|>]]"),
    ),
    Shape(
        "context-instruction",
        {"instruction": "q", "input": "Now.", "output": "a", "context": RAIN},
        stop=f"{NEEDED}context (3 of 3 rows)",
        commands=(asked(f"q\n\nNow.\n\n{RAIN}", "a"), asked("q\n\nNow.", "a")),
    ),
    Shape(
        "context-and-thought",
        {**QA, "context": RAIN, "reasoning": "We add one."},
        stop=f"{NEEDED}context (3 of 3 rows), reasoning (3 of 3 rows)",
        commands=(asked(f"What is one?\n\n{RAIN}", "We add one.\n\nThe first."), ANSWERED),
    ),
    Shape(
        "context-of-messages",
        {"messages": [{"role": "system", "content": "Be kind."}, *chat("Hi", "Yo")], "context": RAIN},
        stop=f"{NEEDED}context (3 of 3 rows)",
        commands=(asked("Hi", "Yo", f"Be kind.\n\n{RAIN}"), asked("Hi", "Yo", "Be kind.")),
    ),
    Shape(
        "system-instruction",
        {"instruction": "q", "output": "a", "system_prompt": BRIEF},
        stop=f"{NEEDED}system_prompt (3 of 3 rows)",
        commands=(asked("q", "a", BRIEF), asked("q", "a")),
    ),
    Shape(
        "system-messages",
        {**TALK, "system_message": BRIEF},
        stop=f"{NEEDED}system_message (3 of 3 rows)",
        commands=(asked("Hi", "Yo", BRIEF), TALKED),
    ),
    Shape(
        "persona",
        {**TALK, "persona": ["I like rain.", "I am old."]},
        stop=f"{NEEDED}persona (3 of 3 rows)",
        commands=(asked("Hi", "Yo", "I like rain.\nI am old."), TALKED),
    ),
    Shape(
        "system-and-persona",
        {**TALK, "system": BRIEF, "persona": "I like rain."},
        stop=f"{NEEDED}persona (3 of 3 rows)",
        commands=(asked("Hi", "Yo", f"{BRIEF}\n\nI like rain."), asked("Hi", "Yo", BRIEF)),
    ),
)
CLASSES, TAGS = ("task=classification", "dataset=auto"), ("task=tokens", "dataset=auto")
NLI: Row = {"premise": "A man runs.", "hypothesis": "He moves."}
STS: Row = {"genre": "news", "filename": "x", "sentence1": "A man runs.", "sentence2": "He moves."}
PAIRED = "A man runs. He moves.\n"
PROPOSED = (
    *(
        Shape(
            f"pair-{name}-{words[0]}",
            [{**row, label: at * step} for at in range(3)],
            stop=f"If {label} is the label of the pair {pair}, type: ",
            commands=(f"{PAIRED}[[{0 * step}]]",),
            words=words,
        )
        for name, row, label, step, pair in (
            ("nli", NLI, "label", 1, "premise, hypothesis"),
            ("sts", STS, "score", 0.5, "sentence1, sentence2"),
            ("qqp", {"question1": "A man runs.", "question2": "He moves."}, "is_duplicate", 1, "question1, question2"),
        )
        for words in (CLASSES, AUTO)
    ),
    Shape(
        "pair-default-task",
        [{**STS, "label": at} for at in range(3)],
        stop="If label is the label of the pair sentence1, sentence2, type: ",
        commands=(f"{PAIRED}[[0]]",),
    ),
    Shape(
        "class-behind-texts",
        [{"title": "The rain of today", "review": "It rains and rains today.", "stars": at} for at in range(3)],
        stop="If stars is the label of review, type: ",
        commands=("It rains and rains today.\n[[0]]",),
        words=CLASSES,
    ),
    *(
        Shape(
            f"words-ner-{words[0]}",
            {"id": "1", "words": ["Bob", "runs"], "ner": ["B-PER", "O"]},
            stop="If ner has the tags of words, type: ",
            commands=("[[B]]ob[[ runs]]\n[[B-PER O]]",),
            words=words,
        )
        for words in (TAGS, AUTO)
    ),
    Shape(
        "squad",
        {"context": RAIN, "question": "Does it rain?", "answers": {"text": ["It does."], "answer_start": [0]}},
        stop="If question asks and answers.text.0 answers, type: ",
        commands=(asked(f"Does it rain?\n\n{RAIN}", "It does."),),
    ),
    *(
        Shape(
            f"answer-{answers}",
            {asks: RAIN, answers: "It is two.", **more},
            stop=f"If {asks} asks and {answers} answers, type: ",
            commands=(asked(RAIN, "It is two."),),
        )
        for asks, answers, more in (
            ("document", "summary", {"id": "1"}),
            ("inputs", "targets", {}),
            ("src", "tgt", {}),
            ("question", "ground_truth", {"6b": {"solution": "It is three."}, "answer_of_7b": "It is four."}),
            ("article", "highlights", {"id": "1"}),
            ("question", "query", {"db_id": "x", "query_toks": ["a"], "sql": {"from": 1}}),
            ("problem_statement", "patch", {"repo": "a/b", "test_patch": "diff a b", "hints_text": "see it"}),
        )
    ),
)
NO_ANSWER = "No column has the name of an answer to "
READ = (
    Shape("number", {"question": ASKS, "answer": 2}, asked(ASKS, "2")),
    Shape("number-of-some", [{"question": ASKS, "answer": each} for each in (0.5, "Two.", 3)], asked(ASKS, "0.5")),
    Shape("number-of-instruction", {"instruction": ASKS, "output": 2}, asked(ASKS, "2")),
    Shape("number-of-completion", {"prompt": "Say 1", "completion": 2}, "Say 1[[2<|end|>]]"),
    Shape(
        "number-with-choices",
        {**MARS, "answer": 1, "choices": ["Mars", "Venus"]},
        stop=f"{NEEDED}choices",
        commands=(asked("Which?\n\nA. Mars\nB. Venus", "1"), asked("Which?", "1")),
    ),
    Shape("number-in-messages", {**TALK, "question": ASKS, "answer": 2}, TALKED),
    Shape("number-that-is-none", {"question": ASKS, "answer": True}, stop="dataset.format=auto knows no format"),
    Shape(
        "number-of-other-name",
        {"query": ASKS, "solution": 2},
        stop="If query asks and solution answers, type: ",
        commands=(asked(ASKS, "2"),),
    ),
    Shape("number-that-counts", {"question": [ASKS], "num_responses": 5, "replies": 2}, stop="docs/data.md has the"),
    Shape(
        "history-from-row-2",
        [{"query": "Hi", "response": "Yo"}, {"query": "And?", "response": "Two", "history": [["Hi", "Yo"]]}],
        stop="If query asks and response answers, type: ",
        commands=(TALKED,),
    ),
    Shape(
        "translation",
        {"translation": {"en": RAIN, "ro": "Azi ploua."}},
        stop="If translation.en asks and translation.ro answers, type: ",
        commands=(asked(RAIN, "Azi ploua."),),
    ),
    *(
        Shape(
            f"tree-{file}",
            {
                "prompt": {
                    "text": "Hi",
                    "role": "prompter",
                    "replies": [
                        {"text": "Yo", "role": "assistant", "replies": [{"text": "And?", "role": "prompter"}]},
                        {"text": "Hey", "role": "assistant", "replies": []},
                    ],
                }
            },
            stop="Each row is a tree of messages. ",
            commands=(TALKED,),
            file=file,
        )
        for file in ("rows.jsonl", "rows.json")
    ),
    Shape(
        "pairs-of-firefly",
        {
            "conversation_id": 1,
            "conversation": [{"human": "Hi", "assistant": "Yo"}, {"human": "And", "assistant": "Me"}],
        },
        stop="Column conversation has pairs of human and assistant. ",
        commands=(f"{TALKED}{asked('And', 'Me')}",),
    ),
    *(
        Shape(
            f"prompts-{answers}",
            {asks: chat(ASKS), "data_source": "x", **more},
            stop=f"If {asks} asks and {answers} answers, type: ",
            commands=(asked(ASKS, "It is two."),),
        )
        for asks, answers, more in (
            ("prompt", "extra_info.answer", {"extra_info": {"answer": "It is two.", "index": 0, "question": ASKS}}),
            ("prompt", "reward_model.ground_truth", {"reward_model": {"ground_truth": "It is two.", "style": "rule"}}),
            ("messages", "ground_truth", {"ground_truth": "It is two."}),
        )
    ),
    Shape("prompts-alone", {"prompt": chat(ASKS)}, stop="prompts without answers, as for RL, are not training data"),
    Shape("truth-of-messages", {**TALK, "ground_truth": "Yo"}, TALKED),
    Shape(
        "settings-of-samples",
        {"prompt": ASKS, "results": [{"sampling_config": "greedy", "outputs": ["Two."]}]},
        stop="docs/data.md has the shapes of rows",
    ),
    Shape("calls-alone", {"question": [chat("Hi")], "function": [{"name": "f"}]}, stop=f"{NO_ANSWER}question. "),
    Shape(
        "choices-alone",
        {"context": RAIN, "question": "Now?", "ans0": "Yes", "ans1": "No", "label": 1},
        stop=f"{NO_ANSWER}question. ",
    ),
)
OTHERS = (
    *(
        Shape(
            f"reward-{file}",
            [{"messages": chat("Hi", text), "reward": reward} for text, reward in (("No", 0.0), ("Yo", 1.0))],
            stop=f"column 'reward' is 0 or 1 in 2 of 2 rows, {JUDGED}",
            commands=(TALKED, asked("Hi", "No")),
            file=file,
        )
        for file in ("rows.jsonl", "rows.json")
    ),
    Shape(
        "score",
        [{**QA, "score": at % 2} for at in range(4)],
        stop=f"column 'score' is 0 or 1 in 4 of 4 rows, {JUDGED}",
        commands=(ANSWERED, ANSWERED),
    ),
    Shape("score-of-stars", [{**QA, "score": at} for at in range(4)], ANSWERED),
    Shape(
        "context-and-reward",
        {**QA, "context": RAIN, "reward": 1},
        stop=f"{NEEDED}context (3 of 3 rows)",
        commands=("", ANSWERED),
    ),
    Shape(
        "about",
        {**QA, "id": "x y z", "source": "a web page", "url": "x y", "category": "of all kinds", "meta": {"a": "b c"}},
        ANSWERED,
    ),
    Shape(
        "images-twice",
        {**QA, "images": ["1.png"], "audio": "a.wav"},
        stop="column 'images', 'audio' stands for images, video or audio",
        commands=(ANSWERED,),
    ),
    Shape(
        "images-with-placeholder",
        {"question": "<image>What?", "answer": "A cat.", "images": ["1.png"]},
        stop="column 'images' stands for images, video or audio",
    ),
    Shape(
        "img",
        {
            "conversations": [
                {"from": "user", "value": "<img>x/0.jpeg</img>\nWhat?"},
                {"from": "gpt", "value": "A cat."},
            ]
        },
        stop="message 0: the placeholder <img> stands for images, video or audio",
    ),
    Shape(
        "img-html",
        {"messages": chat("<img src='a'>", "<p><img src='a'></p>")},
        asked("<img src='a'>", "<p><img src='a'></p>"),
    ),
    Shape("messages-as-json-text", {"messages": json.dumps(chat("Hi", "Yo"))}, TALKED),
    Shape("end-token", {"prompt": "Say 0", "completion": " Zero<|im_end|>\n<|endoftext|>"}, "Say 0[[ Zero<|end|>]]"),
    Shape("end-token-of-answer", {"question": "Say 0", "answer": "Zero</s>\n"}, asked("Say 0", "Zero")),
    Shape(
        "end-token-of-pair",
        {"prompt": ASKS, "chosen": "Two<|eot_id|>", "rejected": "No"},
        both(ASKS, "", "Two", "No"),
        words=DPO,
    ),
    Shape("end-token-of-html", {"question": "Say 0", "answer": "<s>Zero</s>"}, asked("Say 0", "<s>Zero</s>")),
    Shape("end-token-alone", {"prompt": "Say 0", "completion": "<|endoftext|>"}, "Say 0[[<|endoftext|><|end|>]]"),
)
SHAPES = (*PAIRS, *PROPOSED_PAIRS, *TEXTS, *THOUGHTS, *CHOICES, *CONTEXTS, *PROPOSED, *READ, *OTHERS)
