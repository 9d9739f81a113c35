PLAIN_CHAT = """\
{%- if tools %}Tools: {{ tools | tojson }}

{% endif %}
{%- for message in messages %}
{{- message.role | capitalize }}:
{%- if message.role == "assistant" %}
{%- generation %}
{%- if message.content %} {{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %} {{ call.function | tojson }}{% endfor %}


{% endgeneration %}
{%- else %} {{ message.content }}

{% endif %}
{%- endfor %}"""
