// Package post makes one HTTP request and says what came of it.
//
// A [Transport] sends the POST requests of a process. [Transport.Post] never
// returns an error: a [Response] has either the status code of an answer or the
// [Class] of the failure that kept it from being read. What that means for a
// delivery is decided by the caller.
//
// URLs, headers and answers come from strangers. These rules hold for every
// request:
//
//   - One attempt is at most one request on the wire. It is never sent again,
//     redirected or decompressed by the layers below.
//   - A target is parsed strictly, and without asking DNS: an HTTPS URL with a
//     host name or an IP address, on a port where receivers may listen. A host
//     that some resolver could read as another address is refused. What is
//     checked is what is dialled and what the Host field says.
//   - The address is checked after the name was resolved, for each address, right
//     before the connection is made, so that a name which changes its answer
//     gains nothing. Addresses that are not public are refused, unless the
//     configuration lists them.
//   - Custom headers cannot frame the request, sign it, describe its body or
//     name the connection's own fields, and contain printable ASCII only.
//   - The request's timeout covers everything: look-up, connection, TLS, request
//     and answer. Nothing that a receiver sends, or does not send, extends it.
//   - Memory is bounded: 64 KiB of header, [Config.ResponseLimit] of body. What is
//     kept is valid UTF-8 without NUL.
//   - Once a status line was read, its code counts, whatever becomes of the rest.
//   - TLS 1.2 or newer, with a verified certificate. There is no way to turn the
//     verification off.
//   - No error repeats a URL's user, path or query, a header's value, an answer,
//     or an address that was refused.
package post
