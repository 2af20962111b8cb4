package post

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"syscall"

	"code.dny.dev/ssrf"
)

// errRefused is the guard's verdict on one address. It names no address: who
// registers a URL must not learn from us what is inside.
var errRefused = errors.New("the address is not public, and its network is not allowed for this target")

// azureWire is Azure's host agent: it serves machine configuration and DNS to
// every virtual machine from an address that no registry marks as special.
// (https://learn.microsoft.com/azure/virtual-network/what-is-ip-address-168-63-129-16)
var azureWire = netip.MustParsePrefix("168.63.129.16/32")

// guard decides which addresses a request may be sent to. It is asked by the
// dialer, for each address, after the name was resolved and right before the
// connection is made: what a URL says, or what a name resolved to a moment ago,
// proves nothing. Anything it cannot read is refused.
type guard struct {
	allowed []netip.Prefix
	public  *ssrf.Guardian
}

func newGuard(allowed []netip.Prefix) *guard {
	g := &guard{public: ssrf.New(ssrf.WithAnyPort(), ssrf.WithDeniedV4Prefixes(azureWire))}
	for _, p := range allowed {
		// A mapped prefix would never match, since addresses are unmapped first.
		if p.Addr().Is4In6() && p.Bits() >= 96 {
			p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
		}
		g.allowed = append(g.allowed, p.Masked())
	}
	return g
}

// check returns nil for an address that may be connected to, else an error that
// is errRefused.
func (g *guard) check(network, address string) error {
	if network != "tcp4" && network != "tcp6" {
		return errRefused
	}
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return errRefused
	}
	// A zone names an interface of this machine, and no prefix contains an
	// address with one: a deny list would let [::1%lo] through.
	addr := at.Addr().Unmap()
	if addr.Zone() != "" {
		return errRefused
	}
	for _, p := range g.allowed {
		if p.Contains(addr) {
			return nil
		}
	}
	if addr.Is6() && isatap(addr) {
		return errRefused
	}
	if err := g.public.SafeAddr(addr); err != nil {
		return errRefused
	}
	return nil
}

// isatap reports whether an address tunnels to the IPv4 address in its last
// four bytes (RFC 5214, section 6.1: the interface identifier 0:5efe:a.b.c.d or
// 200:5efe:a.b.c.d), which the prefix in front tells nothing about.
func isatap(addr netip.Addr) bool {
	b := addr.As16()
	return b[8]&^0x02 == 0 && b[9] == 0 && b[10] == 0x5e && b[11] == 0xfe
}

// dialing counts the guard's verdicts during one dial, since the dialer returns
// the first error only: a refusal there may hide that another address of the
// same name was allowed and did not answer.
type dialing struct {
	allowed, refused atomic.Int32
}

type dialingKey struct{}

func (d *dialing) count(err error) {
	if err != nil {
		d.refused.Add(1)
		return
	}
	d.allowed.Add(1)
}

// control is net.Dialer.ControlContext: its error stops the dial to one address
// before a packet is sent.
func (g *guard) control(ctx context.Context, network, address string, _ syscall.RawConn) error {
	err := g.check(network, address)
	if d, ok := ctx.Value(dialingKey{}).(*dialing); ok {
		d.count(err)
	}
	if err != nil {
		return fmt.Errorf("guard: %w", err)
	}
	return nil
}
