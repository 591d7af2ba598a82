"""The commands of a text are found as they stand there, and marks that mean nothing are told."""

from tests.docs.blocks import Command, commands_in

TEXT = """# Title

Some `code`, and a list:

- an entry

      that is no block of its own

<!-- needs network: model=llama, git clone -->

    git clone here && cd it
    python -m app.train recipe=full   # a remark

    python -m app.train \\
      model=llama seed=1
    # only a remark

Text.

    from peft import PeftModel
    x = 1

<!-- needs gpu -->

```bash
torchrun -m app.train
```

<!-- not a command -->

    a + b

```
printed, not typed
```

```
$ python -m app.train seed=x
error: seed
  two lines
$ python -m app.train -m seed=1,2
some lines
$ echo $?
3
```
"""


def test_commands_are_found_with_their_place_needs_and_what_is_printed() -> None:
    assert commands_in(TEXT, "x.md") == [
        Command("x.md:11", "git clone here && cd it", "network"),
        Command("x.md:12", "python -m app.train recipe=full   # a remark"),
        Command("x.md:14", "python -m app.train   model=llama seed=1", "network"),
        Command("x.md:26", "torchrun -m app.train", "gpu"),
        Command("x.md:38", "python -m app.train seed=x", None, 2, "error: seed\n  two lines"),
        Command("x.md:41", "python -m app.train -m seed=1,2", None, 3, "some lines"),
    ]
