package receive

import (
	"net"
	"net/http"
	"net/netip"
	"strings"
)

// client is who a request is counted for: an IPv4 address, or the /64 of an
// IPv6 one, of which one customer has all. The zero value is for peers without
// an address.
type client = netip.Prefix

func clientOf(address netip.Addr) client {
	address = address.Unmap().WithZone("")
	bits := 32
	if address.Is6() {
		bits = 64
	}
	prefix, _ := address.Prefix(bits) // the zero Prefix of the zero Addr
	return prefix
}

func peerOf(address net.Addr) netip.Addr {
	if tcp, ok := address.(*net.TCPAddr); ok {
		return tcp.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}

// proxies are the peers whose word about a client's address is believed.
type proxies struct {
	trusted []netip.Prefix
	header  string // such as X-Forwarded-For
}

func (p proxies) trust(address netip.Addr) bool {
	for _, prefix := range p.trusted {
		if prefix.Contains(address.Unmap()) {
			return true
		}
	}
	return false
}

// client returns whom the request is counted for. Every proxy appends to the
// list whom it was asked by, and a client may have begun the list: what the
// last proxy of ours wrote is the rightmost address that is none of ours. An
// entry that is no address ends the search with the proxy that passed it on.
func (p proxies) client(r *http.Request) client {
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return client{}
	}
	address := peer.Addr().Unmap()
	entries := strings.Split(strings.Join(r.Header.Values(p.header), ","), ",")
	for i := len(entries) - 1; i >= 0 && p.trust(address); i-- {
		next, err := parseEntry(strings.TrimSpace(entries[i]))
		if err != nil {
			break
		}
		address = next
	}
	return clientOf(address)
}

// parseEntry takes an address with or without a port: some proxies add it.
func parseEntry(text string) (netip.Addr, error) {
	if withPort, err := netip.ParseAddrPort(text); err == nil {
		return withPort.Addr().Unmap(), nil
	}
	address, err := netip.ParseAddr(strings.Trim(text, "[]"))
	return address.Unmap(), err
}
