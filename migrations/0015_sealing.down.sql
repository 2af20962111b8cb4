drop view postern.public_key, postern.sealing;
drop function postern.seal_connection(bigint, text, text), postern.seal_source(bigint, text, text, text, text),
  postern.seal_endpoint(bigint, text, text, text, text, jsonb, text),
  postern.seals_headers(jsonb, jsonb), postern.seals_url(text, text), postern.seals(text, text);
