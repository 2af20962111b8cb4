package post

import (
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"
)

// inside are addresses that no public receiver has.
var inside = []string{
	"127.0.0.1", "127.255.255.254", "0.0.0.0", "0.1.2.3",
	"10.0.0.1", "172.16.0.1", "172.31.255.254", "192.168.1.1",
	"100.64.0.1", "100.127.255.254",
	"169.254.169.254", "169.254.170.2", "168.63.129.16",
	"192.0.0.1", "192.0.0.192", "192.0.2.1", "198.51.100.1", "203.0.113.1",
	"198.18.0.1", "192.88.99.1", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255",
	"::", "::1",
	"::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254",
	"::7f00:1", "::a9fe:a9fe", "::ffff:0:7f00:1",
	"64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::7f00:1",
	"2002:7f00:1::1", "2002:a9fe:a9fe::1",
	"2001:0:7f00:1::1", "2001:db8::1", "3fff::1", "2001:10::1", "2001:20::1", "2001:2::1",
	"fe80::1", "fec0::1", "fc00::1", "fd00:ec2::254", "fd20:ce::254", "ff02::1",
	"100::1", "100:0:0:1::1", "5f00::1", "2620:4f:8000::1", "4000::1",
	"fe80::5efe:7f00:1", "2606:4700::5efe:7f00:1", "2606:4700::200:5efe:a00:1",
}

func TestGuardRefusesWhatIsNotPublic(t *testing.T) {
	t.Parallel()
	g := newGuard(nil)
	for _, text := range inside {
		addr := netip.MustParseAddr(text)
		if err := g.check("tcp6", netip.AddrPortFrom(addr, 443).String()); err == nil {
			t.Errorf("%s is let through", text)
		} else if strings.Contains(err.Error(), text) {
			t.Errorf("the error shows %s: %v", text, err)
		}
		if addr.Is6() && !addr.Is4In6() {
			if err := g.check("tcp6", netip.AddrPortFrom(addr.WithZone("lo"), 443).String()); err == nil {
				t.Errorf("%s%%lo is let through", text)
			}
		}
	}
	for _, text := range []string{"8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "2001:4860:4860::8888", "::ffff:8.8.8.8"} {
		if err := g.check("tcp4", netip.AddrPortFrom(netip.MustParseAddr(text), 443).String()); err != nil {
			t.Errorf("%s: %v", text, err)
		}
	}
	for _, c := range [][2]string{
		{"udp4", "8.8.8.8:443"}, {"tcp", "8.8.8.8:443"}, {"unix", "/run/postgresql"},
		{"tcp4", ""}, {"tcp4", "8.8.8.8"}, {"tcp4", "name.example:443"}, {"tcp6", "[2606:4700:4700::1111%1]:443"},
	} {
		if err := g.check(c[0], c[1]); err == nil {
			t.Errorf("%s %q is let through", c[0], c[1])
		}
	}
}

func TestGuardLetsListedNetworksThrough(t *testing.T) {
	t.Parallel()
	g := newGuard([]netip.Prefix{
		netip.MustParsePrefix("10.1.2.3/16"),
		netip.MustParsePrefix("fd00::/8"),
		netip.MustParsePrefix("::ffff:172.16.0.0/108"),
		netip.MustParsePrefix("168.63.129.16/32"),
	})
	for address, allowed := range map[string]bool{
		"10.1.0.1": true, "::ffff:10.1.0.1": true, "10.2.0.1": false,
		"fd00:ec2::254": true, "fe80::1": false,
		"172.16.9.9": true, "172.31.0.1": true, "192.168.0.1": false,
		"168.63.129.16": true, "127.0.0.1": false, "8.8.8.8": true,
	} {
		err := g.check("tcp4", netip.AddrPortFrom(netip.MustParseAddr(address), 80).String())
		if (err == nil) != allowed {
			t.Errorf("%s: %v", address, err)
		}
	}
}

// Everything through the real client, against a listener that must see no
// connection.
func TestNothingInsideIsReached(t *testing.T) {
	t.Parallel()
	r := newReceiver(t)
	_, port, _ := net.SplitHostPort(r.Addr())
	server := newNameServer(t, map[string][]answer{
		"localhost":        {{addresses: []string{"127.0.0.1", "::1"}}},
		"inside.example":   {{addresses: []string{"127.0.0.1"}}},
		"metadata.example": {{addresses: []string{"169.254.169.254"}}},
		"mapped.example":   {{addresses: []string{"::ffff:127.0.0.1"}}},
		"many.example":     {{addresses: []string{"10.0.0.1", "127.0.0.1", "::1", "fd00:ec2::254"}}},
	})
	tr := newTestTransport(t, Config{AllowHTTP: true, Timeout: 10 * time.Second, resolver: server.resolver()})

	hosts := []string{
		"localhost", "localhost.", "LOCALHOST", "ⓛocalhost", "inside.example", "inside.example.", "metadata.example",
		"mapped.example", "many.example", "127.0.0.1.", "①②⑦.⓪.⓪.①", "127。0。0。1", "user:pw@127.0.0.1", "8.8.8.8@127.0.0.1",
	}
	odd := []string{
		"2130706433", "0x7f000001", "0177.0.0.1", "127.1", "0", "127.0.0.01", "0x7f.0.0.1",
		"[::1%25lo]", "[::1%251]", "[fe80::1%25lo]", "[fe80::1%251]",
	}
	for _, text := range inside {
		if strings.Contains(text, ":") {
			text = "[" + text + "]"
		}
		hosts = append(hosts, text)
	}
	for _, scheme := range []string{"http", "https"} {
		for _, host := range hosts {
			resp := tr.Post(t.Context(), Request{URL: scheme + "://" + host + ":" + port + "/", Body: []byte("{}")})
			if resp.Class != ClassRefused || resp.Sent {
				t.Errorf("%s: %+v", host, resp)
			}
			if strings.Contains(resp.Error, "127.") || strings.Contains(resp.Error, "::") {
				t.Errorf("%s: the error shows an address: %s", host, resp.Error)
			}
		}
		for _, host := range odd {
			resp := tr.Post(t.Context(), Request{URL: scheme + "://" + host + ":" + port + "/", Body: []byte("{}")})
			if resp.Class != ClassInvalidURL || resp.Sent {
				t.Errorf("%s: %+v", host, resp)
			}
		}
	}
	if n := r.Accepted(); n != 0 {
		t.Errorf("%d connections were made", n)
	}
}

// Names with an address that is allowed and one that is not. The two loopback
// addresses stand for a public one (127.0.0.2) and one inside (127.0.0.1).
func TestOnlyTheAllowedAddressOfANameIsUsed(t *testing.T) {
	t.Parallel()
	private := newReceiver(t)
	_, port, _ := net.SplitHostPort(private.Addr())
	public, err := net.Listen("tcp", "127.0.0.2:"+port)
	if err != nil {
		t.Fatal(err)
	}
	answers := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Connection", "close")
		w.WriteHeader(http.StatusNoContent)
	})}
	defer answers.Close()
	go answers.Serve(public)
	server := newNameServer(t, map[string][]answer{
		"mixed.example":   {{addresses: []string{"127.0.0.1", "127.0.0.2"}}},
		"mixed2.example":  {{addresses: []string{"127.0.0.2", "127.0.0.1"}}},
		"dead.example":    {{addresses: []string{"127.0.0.1", "127.0.0.3"}}},
		"rebound.example": {{addresses: []string{"127.0.0.2"}}, {addresses: []string{"127.0.0.1"}}},
	})
	tr := newTestTransport(t, Config{
		AllowHTTP:     true,
		Timeout:       10 * time.Second,
		AllowNetworks: []netip.Prefix{netip.MustParsePrefix("127.0.0.2/31")},
		resolver:      server.resolver(),
	})
	for _, c := range []struct {
		name   string
		status int
		class  Class
	}{
		{"mixed.example", 204, ""},
		{"mixed2.example", 204, ""},
		// The dialer's first error is the refusal, but an allowed address was
		// tried, and may answer the next time.
		{"dead.example", 0, ClassConnect},
		{"rebound.example", 204, ""},
		{"rebound.example", 0, ClassRefused},
	} {
		resp := tr.Post(t.Context(), Request{URL: "http://" + c.name + ":" + port, Body: []byte("{}")})
		if resp.Status != c.status || resp.Class != c.class || strings.Contains(resp.Error, "127.") {
			t.Errorf("%s: %+v", c.name, resp)
		}
	}
	if n := private.Accepted(); n != 0 {
		t.Errorf("%d connections to the address inside", n)
	}
}

func TestProxyOfTheEnvironmentIsIgnored(t *testing.T) {
	proxy, to := newReceiver(t), newReceiver(t)
	t.Setenv("HTTP_PROXY", proxy.URL)
	t.Setenv("HTTPS_PROXY", proxy.URL)
	t.Setenv("ALL_PROXY", proxy.URL)
	tr := newTestTransport(t, loopback())
	if resp := tr.Post(t.Context(), Request{URL: to.URL, Body: []byte("{}")}); resp.Status != 200 {
		t.Errorf("%+v", resp)
	}
	tr.Post(t.Context(), Request{URL: "http://name.invalid/", Body: []byte("{}")})
	if n := proxy.Accepted(); n != 0 {
		t.Errorf("%d connections to the proxy", n)
	}
}
