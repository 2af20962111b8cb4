-- An order and its message in one transaction, with nothing but psql:
--
--   psql "$DATABASE_URL" -v target_url=https://example.com/hooks -f order.sql

\set ON_ERROR_STOP on
\set QUIET on

create table if not exists orders (
  id    bigint generated always as identity primary key,
  total integer not null check (total > 0)
);

begin;
insert into orders (total) values (4200) returning id as order_id \gset
insert into postern.outbox (event_type, payload, target_url)
values ('order.created', json_build_object('id', :order_id, 'total', 4200, 'by', 'psql'), :'target_url');
commit;
\echo order :order_id committed, its message will be delivered

begin;
insert into orders (total) values (1) returning id as order_id \gset
insert into postern.outbox (event_type, payload, target_url)
values ('order.created', json_build_object('id', :order_id, 'total', 1, 'by', 'psql'), :'target_url');
rollback;
\echo order :order_id rolled back, and its message with it
