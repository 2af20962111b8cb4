/*
Names the column of a message that is longer than claim.sql brings: the message
came back without its columns and was not deleted. The bounds are those of
claim.sql.

Zero rows: it was deleted, or nothing is too long any more.
*/
select field
  from postern.outbox o
 cross join lateral (
   select case
            when octet_length(o.message_id) > 64 then 'message_id'
            when octet_length(o.event_type) > 255 then 'event_type'
            when octet_length(o.payload) > 1048576 then 'payload'
            when octet_length(o.content_type) > 255 then 'content_type'
            when pg_column_size(o.headers) > 32768 then 'headers'
            when octet_length(o.headers::text) > 16384 then 'headers'
            when octet_length(o.target_url) > 8192 then 'target_url'
          end as field) too_long
 where o.id = @outbox_id
   and field is not null
