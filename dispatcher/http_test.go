package dispatcher

import (
	"net/http"
	"net/http/httptest"
	"testing"
)

// A page of somebody else's whose name resolves to this address must not read
// what the status page shows.
func TestStatusPageIsServedForItsOwnHostsAlone(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(handler("status.example:9464", newMetrics("test"), newHealth(t.Context()), "test"))
	defer server.Close()
	for host, served := range map[string]bool{
		"": true, "127.0.0.1": true, "10.1.2.3:9464": true, "[::1]:9464": true, "localhost:9464": true, "LOCALHOST": true,
		"status.example:9464": true, "Status.Example.": true,
		"rebound.example:9464": false, "127.0.0.1.rebound.example": false, "localhost.rebound.example": false, "status.example.rebound.example": false,
	} {
		for path, checked := range map[string]bool{"/": true, "/status.json": true, "/metrics": false, "/healthz": false} {
			request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+path, nil)
			if err != nil {
				t.Fatal(err)
			}
			request.Host = host
			answer, err := server.Client().Do(request)
			if err != nil {
				t.Fatal(err)
			}
			_ = answer.Body.Close()
			want := http.StatusOK
			if checked && !served {
				want = http.StatusMisdirectedRequest
			}
			if answer.StatusCode != want {
				t.Errorf("%s with Host %q: %d, want %d", path, host, answer.StatusCode, want)
			}
		}
	}
}
