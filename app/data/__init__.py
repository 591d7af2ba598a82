"""Files to batches: sources, formats, chat templates, tokens, packing, loader. Knows a tokenizer, no model.

The path of a row, mostly through `app/data/prepare.py`; `app/data/data_report.py` counts the result of each row and
stops a run at rows that must not be trained on.

1. File or hub dataset to rows with their locations: `app/data/sources.py`, read by `app/data/readers.py` and
   `app/data/rows.py`, at an address by `app/data/remote_files.py`. `app/data/transform.py` applies the function of the
   user.
2. Row to conversation, document or example: `app/data/formats.py`, `app/data/conversations.py`. `app/data/roles.py`
   maps column names to roles, `app/data/columns.py` reads their values. Both determine the format
   (`app/data/detect_format.py`), suggestions if no format fits (`app/data/column_sets.py`), and the columns at which
   a run stops (`app/data/refused_columns.py`); `app/data/advised_commands.py` writes the commands in their messages.
   Rows of token IDs (`app/data/token_ids.py`) skip steps 3 and 4.
3. Conversation to text and loss mask: `app/data/loss_mask.py` gets prefixes of the conversation from
   `app/data/chat_template.py`. `app/chat_rendering.py` limits time and size of each rendering. Turns that the template
   rewrites are joined to one text.
4. Text to tokens, in parallel, with checks: `app/data/row_pipeline.py`, `app/data/tokenizer.py`; overlong
   rows: `app/data/row_pipeline.py`.
5. Tokens to one Arrow file per key: `app/data/token_dataset.py`.
6. Rows to bins, shuffled each epoch: `app/data/packing.py`; sources weighted by `app/data/prepare.py`.
7. Bins to a `Batch` of one shape with labels: `app/data/collate.py`, `app/data/objectives.py`, `app/batch.py`.
8. The batches of step s for this process: `app/data/loader.py`. A checkpoint stores only s as the data position.
"""
