/*
Puts what was sealed of an endpoint in its place, and its public key, unless anybody
has changed the row since it was read, or is changing it. Null stays as it is. No
argument is plain text, so none can be logged.

False: it was changed, and is looked at again.
*/
select postern.seal_endpoint(@id, @version, @url, @secret, @previous_secret, @headers, @public_key)
