/*
Bounds the statements that follow in this transaction to @limit_ms. One row,
always.
*/
select set_config('statement_timeout', (@limit_ms::bigint)::text, true)
