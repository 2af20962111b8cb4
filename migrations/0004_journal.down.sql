drop trigger journal_truncate on postern.outbox;
drop trigger journal_truncate on postern.delivery;
drop trigger journal_truncate on postern.endpoint;
drop trigger journal_deleted_messages on postern.outbox;
drop trigger note_direct_change on postern.delivery;
drop trigger journal_direct_change on postern.delivery;
drop trigger note_direct_delete on postern.delivery;
drop trigger journal_direct_delete on postern.delivery;
drop function postern.journal_truncate(), postern.journal_deleted_messages(), postern.by_hand(),
  postern.journal_direct_change(), postern.note_direct_change(), postern.shown_statement(),
  postern.difference(jsonb, jsonb);
drop table postern.journal;
