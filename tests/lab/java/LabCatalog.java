import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import jakarta.servlet.ServletException;
import jakarta.servlet.http.HttpServlet;
import jakarta.servlet.http.HttpServletRequest;
import jakarta.servlet.http.HttpServletRequestWrapper;
import jakarta.servlet.http.HttpServletResponse;
import jakarta.servlet.http.HttpServletResponseWrapper;
import java.io.IOException;
import java.net.InetSocketAddress;
import java.net.URI;
import java.net.URLEncoder;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.hadoop.conf.Configuration;
import org.apache.iceberg.CatalogUtil;
import org.apache.iceberg.rest.RESTCatalogAdapter;
import org.apache.iceberg.rest.RESTCatalogServlet;
import org.eclipse.jetty.server.Server;
import org.eclipse.jetty.servlet.ServletContextHandler;
import org.eclipse.jetty.servlet.ServletHolder;

/**
 * Iceberg's reference REST catalog as a company has it: several warehouses, each under a prefix that the client learns
 * from the config, and a gate before them. Usage: LabCatalog HOST PORT FOLDER; the rest comes from the environment, see
 * services.py. The reference server knows neither, and listens on every interface.
 *
 * <p>The warehouse `lake` is there; one called `t-...` comes with the first question about it, one for each test.
 */
public class LabCatalog extends HttpServlet {
  private static final ObjectMapper JSON = new ObjectMapper();
  private final Map<String, RESTCatalogServlet> warehouses = new ConcurrentHashMap<>();
  private final Map<String, Integer> requests = new TreeMap<>();
  private final String folder;
  private final Gate gate = new Gate();

  LabCatalog(String folder) {
    this.folder = folder;
  }

  public static void main(String[] args) throws Exception {
    ServletContextHandler handler = new ServletContextHandler(ServletContextHandler.NO_SESSIONS);
    handler.addServlet(new ServletHolder(new LabCatalog(args[2])), "/*");
    Server http = new Server(new InetSocketAddress(args[0], Integer.parseInt(args[1])));
    http.setHandler(handler);
    http.start();
    http.join();
  }

  @Override
  protected void service(HttpServletRequest request, HttpServletResponse response)
      throws ServletException, IOException {
    answer(request, new FirstStatus(response));
  }

  private void answer(HttpServletRequest request, HttpServletResponse response) throws ServletException, IOException {
    String path = request.getRequestURI();
    if (path.equals("/lab/requests")) {
      answer(response, 200, requestsSoFar());
    } else if (gate.admits(request, response)) {
      if (path.equals("/v1/config")) {
        config(request.getParameter("warehouse"), response);
      } else {
        String[] parts = path.split("/", 4); // "", "v1", prefix, rest
        RESTCatalogServlet warehouse = parts.length == 4 ? warehouses.get(parts[2]) : null;
        if (warehouse == null) {
          refuse(response, 404, "NotFoundException", "no warehouse has the prefix of " + path);
        } else {
          warehouse.service(new WithoutPrefix(request, "/v1/" + parts[3]), response);
        }
      }
    }
    count(request.getMethod() + " " + response.getStatus());
  }

  private void config(String warehouse, HttpServletResponse response) throws IOException {
    String name = warehouse == null || warehouse.isEmpty() ? "lake" : warehouse;
    if (!name.equals("lake") && !name.matches("t-[a-z0-9-]{1,60}")) {
      refuse(response, 404, "NotFoundException", "Unable to find warehouse " + name);
      return;
    }
    warehouses.computeIfAbsent(name, this::open);
    answer(response, 200, Map.of("defaults", Map.of(), "overrides", Map.of("prefix", name)));
  }

  private RESTCatalogServlet open(String name) {
    Map<String, String> properties = new HashMap<>();
    properties.put("catalog-impl", "org.apache.iceberg.jdbc.JdbcCatalog");
    properties.put("uri", "jdbc:sqlite:" + folder + "/" + name + ".db");
    properties.put("clients", "1"); // SQLite refuses a second writer at once
    properties.put("warehouse", System.getenv("LAB_WAREHOUSES") + "/" + name);
    String s3 = System.getenv("LAB_S3_ENDPOINT");
    if (s3 != null) {
      properties.put("io-impl", "org.apache.iceberg.aws.s3.S3FileIO");
      properties.put("s3.endpoint", s3);
      properties.put("s3.path-style-access", "true");
      properties.put("client.region", System.getenv("AWS_REGION"));
    }
    return new RESTCatalogServlet(
        new RESTCatalogAdapter(CatalogUtil.buildIcebergCatalog(name, properties, new Configuration())));
  }

  private synchronized void count(String what) {
    requests.merge(what, 1, Integer::sum);
  }

  private synchronized Map<String, Integer> requestsSoFar() {
    return new TreeMap<>(requests);
  }

  private static void answer(HttpServletResponse response, int status, Object body) throws IOException {
    response.setStatus(status);
    response.setContentType("application/json");
    JSON.writeValue(response.getOutputStream(), body);
  }

  private static void refuse(HttpServletResponse response, int status, String type, String message)
      throws IOException {
    answer(response, status, Map.of("error", Map.of("message", message, "type", type, "code", status)));
  }

  /** The reference servlet answers with the right status, and then sets 500, which comes too late to be sent. */
  private static class FirstStatus extends HttpServletResponseWrapper {
    FirstStatus(HttpServletResponse response) {
      super(response);
    }

    @Override
    public void setStatus(int status) {
      if (!isCommitted()) {
        super.setStatus(status);
      }
    }
  }

  /** The request as the reference servlet expects it. */
  private static class WithoutPrefix extends HttpServletRequestWrapper {
    private final String path;

    WithoutPrefix(HttpServletRequest request, String path) {
      super(request);
      this.path = path;
    }

    @Override
    public String getRequestURI() {
      return path;
    }

    @Override
    public String getPathInfo() {
      return path;
    }
  }

  /** Answers what Apache Polaris answers: 404 without its header, an empty 401 without a token, 403 without a role. */
  private static class Gate {
    private final String introspection = System.getenv("LAB_INTROSPECTION");
    private final HttpClient http = HttpClient.newHttpClient();
    private final Map<String, JsonNode> known = new ConcurrentHashMap<>();

    boolean admits(HttpServletRequest request, HttpServletResponse response) throws IOException {
      if (introspection == null) {
        return true;
      }
      String[] header = System.getenv("LAB_HEADER").split(": ");
      if (!header[1].equals(request.getHeader(header[0]))) {
        refuse(response, 404, "MissingOrInvalidRealm", "Missing or invalid realm");
        return false;
      }
      JsonNode token = token(request.getHeader("Authorization"));
      if (token == null) {
        response.setStatus(401);
        return false;
      }
      if (!List.of(token.path("scope").asText().split(" ")).contains(System.getenv("LAB_SCOPE"))) {
        refuse(response, 403, "ForbiddenException", "Principal has no activated grants");
        return false;
      }
      return true;
    }

    /** What the identity provider says of the token; null when it is none, or none any more. */
    private JsonNode token(String authorization) throws IOException {
      if (authorization == null || !authorization.startsWith("Bearer ")) {
        return null;
      }
      String text = authorization.substring("Bearer ".length());
      JsonNode found = known.get(text);
      if (found == null) {
        found = introspect(text);
        known.put(text, found);
      }
      boolean valid = found.path("active").asBoolean() && found.path("exp").asLong() * 1000 > System.currentTimeMillis();
      return valid ? found : null;
    }

    private JsonNode introspect(String token) throws IOException {
      String[] client = System.getenv("LAB_INTROSPECTION_CLIENT").split(":", 2);
      String form = "client_id=" + encode(client[0]) + "&client_secret=" + encode(client[1]) + "&token=" + encode(token);
      HttpRequest question =
          HttpRequest.newBuilder(URI.create(introspection))
              .header("Content-Type", "application/x-www-form-urlencoded")
              .POST(HttpRequest.BodyPublishers.ofString(form))
              .build();
      try {
        return JSON.readTree(http.send(question, HttpResponse.BodyHandlers.ofString()).body());
      } catch (InterruptedException interrupted) {
        throw new IOException(interrupted);
      }
    }

    private static String encode(String value) {
      return URLEncoder.encode(value, StandardCharsets.UTF_8);
    }
  }
}
