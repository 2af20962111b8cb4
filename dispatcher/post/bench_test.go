package post

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"testing"
)

// answering serves a fixed answer over loopback with as little work as HTTP
// allows, so that the benchmarks measure the client.
func answering(b *testing.B) string {
	b.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { listener.Close() })
	go func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				buffer := make([]byte, 64<<10)
				for {
					if _, err := c.Read(buffer); err != nil {
						return
					}
					c.Write([]byte("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nDate: Fri, 02 Jan 2026 03:04:05 GMT\r\n\r\nok"))
				}
			}()
		}
	}()
	return "http://" + listener.Addr().String() + "/hooks/orders"
}

func benchHeaders() []Header {
	return []Header{
		{Name: "Webhook-Id", Value: "msg_2KWPBgLlAfxdpx2AI54pPJ85f4W"},
		{Name: "Webhook-Timestamp", Value: "1735689600"},
		{Name: "Webhook-Signature", Value: "v1,K5oZfzN95Z9UVu1EsfQmfVNQhnkZ2pj9o9NDN/H/pI4="},
		{Name: "X-Signature", Value: "sha256=67828aa2f56ba737f190b108aa5a408e3ceac2faaa60456d7432972f3eb3e580"},
	}
}

func BenchmarkPost(b *testing.B) {
	tr := New(loopback())
	defer tr.Close()
	r := Request{URL: answering(b), Signed: benchHeaders(), Body: make([]byte, 1024)}
	b.ReportAllocs()
	for b.Loop() {
		if resp := tr.Post(b.Context(), r); resp.Status != 200 {
			b.Fatalf("%+v", resp)
		}
	}
}

// BenchmarkNetHTTP is the same exchange as net/http does it by itself.
func BenchmarkNetHTTP(b *testing.B) {
	url, body := answering(b), make([]byte, 1024)
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	b.ReportAllocs()
	for b.Loop() {
		r, err := http.NewRequestWithContext(b.Context(), http.MethodPost, url, bytes.NewReader(body))
		if err != nil {
			b.Fatal(err)
		}
		for _, h := range benchHeaders() {
			r.Header.Set(h.Name, h.Value)
		}
		resp, err := client.Do(r)
		if err != nil {
			b.Fatal(err)
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
}
