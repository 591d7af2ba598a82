"""Files to batches: sources, formats, chat templates, tokens, packing, loader. Knows a tokenizer, no model.

The path of a row, most of it through `app/data/prepare.py`; `app/data/data_report.py` counts what became of each row
and stops a run at rows that it must not train on.

1. File or hub dataset to rows with their places: `app/data/sources.py`, read by `app/data/readers.py` and
   `app/data/rows.py`.
2. Row to conversation, document or example: `app/data/formats.py`, `app/data/conversations.py`. `app/data/roles.py`
   knows what the names of columns mean, `app/data/columns.py` finds what a row holds there. From both follow the format
   (`app/data/detect_format.py`), what to type where none is found (`app/data/column_sets.py`), and the columns at which
   a run stops (`app/data/refused_columns.py`); `app/data/advised_commands.py` writes the commands of their messages.
3. Conversation to text and loss mask: `app/data/loss_mask.py` asks `app/data/chat_template.py` for prefixes of the
   conversation. Each rendering is bounded in time and size by `app/chat_rendering.py`. Turns that the template
   rewrites become one text.
4. Text to tokens, in parallel, with checks: `app/data/row_pipeline.py`, `app/data/tokenizer.py`; rows that are too
   long: `app/data/row_pipeline.py`.
5. Tokens to one Arrow file per key: `app/data/token_dataset.py`.
6. Rows to bins, shuffled each epoch: `app/data/packing.py`; sources weighted by `app/data/prepare.py`.
7. Bins to a `Batch` of one shape with labels: `app/data/collate.py`, `app/data/objectives.py`, `app/batch.py`.
8. The batches of step s for this process: `app/data/loader.py`. A checkpoint stores no position but s.
"""
