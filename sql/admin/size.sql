/*
Size and bloat of the tables, and when they were vacuumed. The dead share is
what vacuum has yet to free; if it stays high, blocking.sql says who holds it
back.

  psql -f sql/admin/size.sql
*/
select s.relname as table,
       pg_size_pretty(pg_table_size(s.relid)) as heap,
       pg_size_pretty(pg_indexes_size(s.relid)) as indexes,
       greatest(c.reltuples, 0)::bigint as rows_estimated,
       s.n_dead_tup as dead_rows,
       round(100.0 * s.n_dead_tup / nullif(s.n_live_tup + s.n_dead_tup, 0), 1) as dead_percent,
       round(100.0 * s.n_tup_hot_upd / nullif(s.n_tup_upd, 0), 1) as hot_percent,
       greatest(s.last_vacuum, s.last_autovacuum) as vacuumed,
       greatest(s.last_analyze, s.last_autoanalyze) as analyzed
  from pg_stat_user_tables s
  join pg_class c on c.oid = s.relid
 where s.schemaname = 'postern'
 order by pg_total_relation_size(s.relid) desc;

select i.indexrelname as index, pg_size_pretty(pg_relation_size(i.indexrelid)) as size, i.idx_scan as scans
  from pg_stat_user_indexes i
 where i.schemaname = 'postern'
 order by pg_relation_size(i.indexrelid) desc;
