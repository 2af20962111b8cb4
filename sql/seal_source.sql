/*
Puts what was sealed of a source in its place, as seal_endpoint.sql does.

False: it was changed, and is looked at again.
*/
select postern.seal_source(@id, @version, @secret, @previous_secret, @id_secret)
