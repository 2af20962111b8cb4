/*
Gives an endpoint a new signing secret. For a day, or for as long as overlap
says, requests are signed with both, so the receiver can change over in its own
time. The new secret is shown once, here.

  psql -v endpoint=12 -f sql/admin/rotate_secret.sql
  psql -v endpoint=12 -v overlap='3 days' -f sql/admin/rotate_secret.sql
*/
\if :{?endpoint}
\else
  \warn 'usage: psql -v endpoint=<id> [-v overlap=…] -f rotate_secret.sql'
  \quit
\endif
\if :{?overlap}
\else
  \set overlap '1 day'
\endif

select postern.rotate_secret(:endpoint, :'overlap'::interval) as new_secret;
