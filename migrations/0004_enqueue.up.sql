/*
The outbox for those who prefer a function to an INSERT: it knows what to do
with an idempotency key that is taken.
*/

/* ---------------------------------------------------------- new_message_id

Time first, so that the unique index grows at its right end; 80 random bits
after it. */

create function postern.new_message_id() returns text
language sql volatile parallel safe
return 'msg_' || lpad(to_hex((extract(epoch from clock_timestamp()) * 1000)::bigint), 12, '0')
              || translate(substr(gen_random_uuid()::text, 15), '-', '');

comment on function postern.new_message_id() is
  'A random webhook-id that begins with the time.';

alter table postern.outbox alter column message_id set default postern.new_message_id();

/* ----------------------------------------------------------------- enqueue

Writes one message in the caller's transaction and with the caller's rights.

  select * from postern.enqueue('order.created', '{"id":1}',
                                target_url => 'https://example.com/hook',
                                idempotency_key => 'order-1');

Returns one row: id, message_id, and whether the message is new. With an
idempotency key that the tenant has used before, nothing is written, the first
body stays, and the row is that of the first message. Waits for a transaction
that is just writing the same key; under REPEATABLE READ that one's commit
fails this transaction with 40001, to be tried again as a whole. */

create function postern.enqueue(
  out id              bigint,
  in  event_type      text,
  in  payload         text,
  in  target_url      text        default null,
  in  tenant          text        default '',
  in  idempotency_key text        default null,
  inout message_id    text        default null,
  in  content_type    text        default 'application/json',
  in  headers         jsonb       default null,
  in  deliver_after   timestamptz default null,
  in  expires_at      timestamptz default null,
  in  max_attempts    integer     default null,
  out is_new          boolean
)
language plpgsql set search_path = ''
as $$
#variable_conflict use_column
declare
  own_id text := coalesce(enqueue.message_id, postern.new_message_id());
begin
  loop
    insert into postern.outbox as o
           (message_id, tenant, event_type, payload, content_type, headers,
            target_url, idempotency_key, deliver_after, expires_at, max_attempts)
    values (own_id, enqueue.tenant, enqueue.event_type, enqueue.payload, enqueue.content_type, enqueue.headers,
            enqueue.target_url, enqueue.idempotency_key, enqueue.deliver_after, enqueue.expires_at, enqueue.max_attempts)
        on conflict (tenant, idempotency_key) where idempotency_key is not null do nothing
    returning o.id, o.message_id into enqueue.id, enqueue.message_id;
    if found then
      enqueue.is_new := true;
      return;
    end if;

    -- A new statement has a new snapshot, in which the other one is visible.
    select o.id, o.message_id
      into enqueue.id, enqueue.message_id
      from postern.outbox o
     where o.tenant = enqueue.tenant
       and o.idempotency_key = enqueue.idempotency_key;
    if found then
      enqueue.is_new := false;
      return;
    end if;
    -- It was deleted in between, so the key is free again.
  end loop;
end
$$;

comment on function postern.enqueue is
  'Writes one message in the caller''s transaction; returns id, message_id and whether it is new.';
