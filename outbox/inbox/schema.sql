/*
The events that a receiver has already acted on, one row an event of a sender.
Run this from the receiver's own migrations, in the database that holds what
its handler changes: the row and the change share a transaction.

Collation "C": ids are bytes and not words, and an update of the operating
system's libraries must never reorder this key. Only inserts and the pruning's
deletes touch the table, so it needs no attention beyond autovacuum.
*/
create table postern_inbox (
  source      text collate "C" not null,
  event_id    text collate "C" not null,
  received_at timestamptz not null default now(),

  primary key (source, event_id),
  constraint "source is 1 to 255 bytes"
    check (octet_length(source) between 1 and 255),
  constraint "event_id is 1 to 255 bytes"
    check (octet_length(event_id) between 1 and 255)
);

-- Pruning walks from the oldest.
create index postern_inbox_received_at on postern_inbox (received_at);
