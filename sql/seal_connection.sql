/*
Puts the sealed private key of a connection in its place, as seal_endpoint.sql does.

False: it was changed, and is looked at again.
*/
select postern.seal_connection(@id, @version, @private_key)
