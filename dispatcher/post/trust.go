package post

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Trust is what an operator grants one target beyond what every target has, and
// how its TLS differs. The zero value grants nothing.
type Trust struct {
	AllowNetworks []netip.Prefix // as in Config, in addition to its
	AllowHTTP     bool           // plain http://
	AllowPorts    []uint16       // in addition to Config's
	CA            string         // PEM; the authorities to trust instead of the system's
	Certificate   string         // PEM; the client certificate and its chain
	PrivateKey    string         // PEM; never shown in an error
}

// With returns a transport for one target. It shares no connection with t: one
// that was made with more trust must never carry a request of a target with
// less. Retire it when it is not needed any more.
//
// The error says what is wrong with the certificates, in words that may be
// stored and shown.
func (t *Transport) With(trust Trust) (*Transport, error) {
	cfg := t.cfg
	cfg.AllowNetworks = slices.Concat(cfg.AllowNetworks, trust.AllowNetworks)
	cfg.AllowHTTP = cfg.AllowHTTP || trust.AllowHTTP
	cfg.trustedPorts = trust.AllowPorts
	if trust.CA != "" {
		list, err := certificates(trust.CA)
		if err != nil {
			return nil, fmt.Errorf("CA: %w", err)
		}
		cfg.rootCAs = x509.NewCertPool()
		for _, c := range list {
			cfg.rootCAs.AddCert(c)
		}
	}
	if trust.Certificate != "" || trust.PrivateKey != "" {
		if _, err := certificates(trust.Certificate); err != nil {
			return nil, fmt.Errorf("client certificate: %w", err)
		}
		pair, err := tls.X509KeyPair([]byte(trust.Certificate), []byte(trust.PrivateKey))
		if err != nil {
			return nil, errors.New("client certificate: its private key cannot be read, or belongs to another certificate")
		}
		cfg.certificate = &pair
	}
	return New(cfg), nil
}

// Retire closes the transport once no request is out any more.
func (t *Transport) Retire() {
	t.retired.Store(true)
	t.http.CloseIdleConnections()
	if t.busy.Load() == 0 {
		t.Close()
	}
}

// Expiry returns when the first of PEM certificates ends. The error says in words
// that may be shown why they cannot be read.
func Expiry(certificatesPEM string) (time.Time, error) {
	list, err := certificates(certificatesPEM)
	if err != nil {
		return time.Time{}, err
	}
	first := list[0].NotAfter
	for _, c := range list {
		if c.NotAfter.Before(first) {
			first = c.NotAfter
		}
	}
	return first, nil
}

// certificates reads PEM certificates, one at least.
func certificates(text string) (list []*x509.Certificate, err error) {
	rest := []byte(text)
	for {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			return nil, errors.New("a PEM block in it is no certificate")
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, errors.New("a certificate in it cannot be read")
		}
		list = append(list, c)
	}
	if len(list) == 0 || strings.TrimSpace(string(rest)) != "" {
		return nil, errors.New("it must be certificates in PEM form and nothing else")
	}
	return list, nil
}

// Origin is the scheme, host and port of a target in one spelling, or "" where it
// cannot be read.
func Origin(raw string) string {
	to, err := parseTarget(raw, &Config{AllowHTTP: true, anyPort: true})
	if err != nil {
		return ""
	}
	return to.url.Scheme + "://" + to.host
}
