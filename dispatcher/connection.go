package dispatcher

import (
	"context"
	"fmt"
	"net/netip"
	"sync/atomic"

	"github.com/jackc/pgx/v5"

	"postern/dispatcher/post"
	"postern/sql/session"
)

// connectionRow is a row of connections.sql.
type connectionRow struct {
	ID          int64
	EndpointID  *int64
	Source      *string
	TargetURL   *string
	Origin      string
	Networks    []string
	AllowHTTP   bool `db:"allow_http"`
	Ports       []int32
	CA          *string `db:"ca"`
	Certificate *string
	PrivateKey  *string
}

// connection is how to connect to one target that is not like all others.
type connection struct {
	row       connectionRow
	origin    string
	transport *post.Transport
	err       error // why there is no transport
}

// connections knows the rows of postern.connection. Looking one up is safe while
// they are replaced; only followBreakers replaces them.
type connections struct {
	known atomic.Pointer[connectionSet]
}

type connectionSet struct {
	endpoints map[int64]*connection
	sources   map[string]*connection // by outbox.source
}

// readConnections reads the rows. Transports of unchanged ones are kept, with
// their open connections.
func (d *Dispatcher) readConnections(ctx context.Context) error {
	rows, err := session.Query(ctx, d.db, "connections", pgx.StrictNamedArgs{}, pgx.RowToStructByName[connectionRow])
	if err != nil {
		return err
	}
	before := d.connections.known.Load()
	kept := map[string]*connection{}
	for c := range before.all() {
		kept[c.row.identity()] = c
	}
	set := &connectionSet{endpoints: map[int64]*connection{}, sources: map[string]*connection{}}
	for _, row := range rows {
		err := d.openKey(&row)
		c := kept[row.identity()]
		if c == nil {
			c = d.newConnection(row, err)
		}
		delete(kept, row.identity())
		if row.EndpointID != nil {
			set.endpoints[*row.EndpointID] = c
		} else if row.Source != nil {
			set.sources[*row.Source] = c
		}
	}
	d.connections.known.Store(set)
	for _, c := range kept {
		if c.transport != nil {
			c.transport.Retire()
		}
	}
	return nil
}

// openKey opens the private key of a row. What does not open stays sealed.
func (d *Dispatcher) openKey(row *connectionRow) error {
	if row.PrivateKey == nil {
		return nil
	}
	opened, err := d.cfg.SealingKeys.Open(*row.PrivateKey, placeOf("connection", row.ID, "private_key"))
	if err != nil {
		return sealedError{"connection of " + row.name(), "private key", err}
	}
	row.PrivateKey = &opened
	return nil
}

// newConnection makes the transport of a row, unless its key did not open.
func (d *Dispatcher) newConnection(row connectionRow, err error) *connection {
	c := &connection{row: row, origin: post.Origin(row.Origin), err: err}
	if err != nil {
		d.sayCannotOpen(err)
		return c
	}
	trust := post.Trust{
		AllowHTTP: row.AllowHTTP, CA: deref(row.CA), Certificate: deref(row.Certificate), PrivateKey: deref(row.PrivateKey),
	}
	for _, text := range row.Networks {
		if network, err := netip.ParsePrefix(text); err == nil { // a cidr of Postgres is one
			trust.AllowNetworks = append(trust.AllowNetworks, network)
		}
	}
	for _, port := range row.Ports {
		trust.AllowPorts = append(trust.AllowPorts, uint16(port))
	}
	if c.transport, c.err = d.post.With(trust); c.err != nil {
		d.log.Error().Err(c.err).Str("target", row.name()).Msg("a connection cannot be used; nothing is sent to its target")
	}
	return c
}

// transport returns what a delivery is sent with: that of its endpoint, or of the
// source whose event it is (not its tenant, which any application may write), as long as the URL has the origin that was trusted.
func (d *Dispatcher) transport(c *claimed) (*post.Transport, error) {
	set := d.connections.known.Load()
	if set == nil {
		return d.post, nil
	}
	var found *connection
	if c.EndpointID != nil {
		found = set.endpoints[*c.EndpointID]
	} else if found = set.sources[deref(c.Source)]; found != nil && deref(found.row.TargetURL) != *c.URL {
		found = nil
	}
	if found == nil || post.Origin(*c.URL) != found.origin {
		return d.post, nil
	}
	return found.transport, found.err
}

// all ranges over every connection; of nil there are none.
func (s *connectionSet) all() func(yield func(*connection) bool) {
	return func(yield func(*connection) bool) {
		if s == nil {
			return
		}
		for _, c := range s.endpoints {
			if !yield(c) {
				return
			}
		}
		for _, c := range s.sources {
			if !yield(c) {
				return
			}
		}
	}
}

// close closes every transport, when no request is out any more.
func (s *connections) close() {
	for c := range s.known.Load().all() {
		if c.transport != nil {
			c.transport.Close()
		}
	}
}

func (r *connectionRow) name() string {
	if r.EndpointID != nil {
		return fmt.Sprintf("ep_%d", *r.EndpointID)
	}
	return "source " + deref(r.Source)
}

// identity tells rows apart that need transports of their own.
func (r *connectionRow) identity() string {
	return fmt.Sprintf("%q", []string{
		r.name(), deref(r.TargetURL), r.Origin, fmt.Sprint(r.Networks, r.AllowHTTP, r.Ports),
		deref(r.CA), deref(r.Certificate), deref(r.PrivateKey),
	})
}
